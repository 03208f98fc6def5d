"""The losses of a step, against values worked out by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from assay.training.losses import IGNORED, LOSSES, add_losses

FLAT = torch.zeros(1, 3, 4)  # ln 4 for each label
CTC = SimpleNamespace(pad_token_id=0)


@pytest.mark.parametrize(
    ("name", "logits", "labels", "total", "count"),
    [
        ("next-token", FLAT, [[3, 1, IGNORED]], math.log(4), 1),
        ("token", FLAT, [[3, 1, IGNORED]], 2 * math.log(4), 2),
        ("class", FLAT[0], [0, 3, IGNORED], 2 * math.log(4), 2),
        ("multi-label", torch.zeros(2, 3), [[0.0, 1.0, 0.0]] * 2, 6 * math.log(2), 6),
        ("regression", torch.tensor([[1.0], [3.0]]), [0.0, 1.0], 5.0, 2),
        ("regression", torch.tensor([[1.0, 3.0]]), [[0.0, 1.0]], 5.0, 2),
        # Of 3 frames of 4 values, 6 of 64 paths read "1", and 5 - blank in between or before - read "1 2".
        ("ctc", FLAT, [[1]], math.log(64 / 6), 1),
        ("ctc", FLAT, [[1, 2]], math.log(64 / 5), 2),
        ("ctc-mean", FLAT, [[1, 2]], math.log(64 / 5) / 2, 1),
    ],
)
def test_sum_and_number_of_labels(
    name: str, logits: torch.Tensor, labels: list[object], total: float, count: int
) -> None:
    targets = torch.tensor(labels)
    assert float(add_losses(name, logits, targets, CTC)) == pytest.approx(total, rel=1e-6)
    assert LOSSES[name].count(targets) == count


def test_blank_is_the_padding_token_of_the_model() -> None:
    sure = torch.full((1, 2, 3), -50.0)
    sure[0, 0, 2] = sure[0, 1, 1] = 0.0  # reads "2 1", or "2" if 1 is the blank
    labels = torch.tensor([[2]])
    assert float(add_losses("ctc", sure, labels, SimpleNamespace(pad_token_id=1))) < 1e-6
    assert float(add_losses("ctc", sure, labels, CTC)) > 40


def test_narrow_logits_are_added_in_float32() -> None:
    assert (
        add_losses("class", FLAT[0].bfloat16(), torch.tensor([0, 1, 2]), None).dtype
        is torch.float32
    )
