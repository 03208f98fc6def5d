"""What weights know of sequences: losses by hand."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from assay.training.losses import IGNORED
from assay.training.overfit.sides import (
    load_weights,
    measure_memorization,
    read_trained,
    write_trained,
)

VOCABULARY = 8
# A prompt of 2, labels 3 and 4, two of padding.
BATCH = {
    "input_ids": torch.tensor([[1, 2, 3, 4, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]]),
    "labels": torch.tensor([[IGNORED, IGNORED, 3, 4, IGNORED, IGNORED]]),
}


class Parrot(nn.Module):
    """Is sure of one token at every place."""

    def __init__(self, tokens: list[int], gap: float) -> None:
        super().__init__()
        self.logits = gap * functional.one_hot(torch.tensor([tokens]), VOCABULARY).float()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        assert not self.training
        assert input_ids.shape == attention_mask.shape
        return SimpleNamespace(logits=self.logits)


def test_flat_model_has_the_logarithm_of_the_vocabulary_for_every_kind() -> None:
    memorization = measure_memorization(Parrot([0] * 6, 0.0), [BATCH])

    assert memorization.nats == pytest.approx(
        dict.fromkeys(
            ("labels", "prompt", "padding", "labels not shifted", "labels shifted twice"),
            math.log(8),
        )
    )


@pytest.mark.parametrize(
    ("tokens", "known"),
    [
        ([7, 3, 4, 7, 7, 7], "labels"),
        ([2, 7, 7, 7, 7, 7], "prompt"),
        ([7, 7, 7, 0, 0, 7], "padding"),
        ([7, 7, 3, 4, 7, 7], "labels not shifted"),
        ([3, 4, 7, 7, 7, 7], "labels shifted twice"),
    ],
)
def test_each_kind_is_known_by_who_says_it_at_its_place(tokens: list[int], known: str) -> None:
    model = Parrot(tokens, 30.0)
    memorization = measure_memorization(model, [BATCH])

    assert memorization.nats[known] == pytest.approx(0, abs=1e-9)
    assert all(nats > 5 for kind, nats in memorization.nats.items() if kind != known)
    assert model.training


def test_kind_that_the_sequences_do_not_have_is_not_named() -> None:
    whole = {**BATCH, "attention_mask": torch.ones(1, 6, dtype=torch.int64)}

    assert "padding" not in measure_memorization(Parrot([0] * 6, 0.0), [whole]).nats


def test_weights_of_several_ranks_come_together(tmp_path: Path) -> None:
    write_trained(tmp_path, 0, {"weight": torch.full((1, 2), 3.0)})
    write_trained(tmp_path, 2, {"bias": torch.full((1,), 4.0)})
    model = nn.Linear(2, 1)

    assert load_weights(model, read_trained(tmp_path)) == []
    assert model.weight.tolist() == [[3.0, 3.0]]
    assert model.bias.tolist() == [4.0]


def test_absent_and_misshapen_weights_are_named() -> None:
    assert load_weights(nn.Linear(2, 1), {"weight": torch.zeros(2, 2)}) == ["weight", "bias"]
