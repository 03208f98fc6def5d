"""Models under test: their choice, their outputs as a tuple, and another layout of their weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from assay.errors import UsageError
from assay.models import RECIPES, load_model
from assay_expectations import models_under_test
from assay_expectations.models_under_test import (
    FusedPart,
    TwoParts,
    other_layout,
    tuple_differences,
)
from assay_expectations.pytest_plugin import MODELS_VARIABLE, expected_models


class Config:
    """Answers for the option of the command line."""

    def __init__(self, *models: str) -> None:
        self.models = [*models] or None

    def getoption(self, name: str) -> list[str] | None:
        assert name == "expectation_model"
        return self.models


@pytest.mark.parametrize(
    ("option", "variable", "expected"),
    [
        (["a", "b", "a"], "c", ["a", "b"]),
        ([], " c, d,", ["c", "d"]),
        ([], "", [f"micro:{name}" for name in RECIPES]),
    ],
)
def test_the_option_goes_before_the_variable_and_that_before_the_recipes(
    option: list[str], variable: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODELS_VARIABLE, variable)
    config: Any = Config(*option)
    assert expected_models(config) == expected


@pytest.mark.parametrize("model", ["micro:llama", "micro:bert"])
def test_clean_models_return_the_same_tensors(model: str) -> None:
    assert tuple_differences(model, "cpu/float32") == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda given: (given[0] * 1.001, *given[1:]), ["tensor 0 of the tuple, [1, 8, 260], differs"]),
        (lambda given: given[:-1], ["1 tensors in the tuple, 6 by name"]),
        (list, ["return_dict=False returns a list"]),
    ],
    ids=["other-values", "one-is-missing", "no-tuple"],
)  # fmt: skip
def test_every_difference_is_named(
    monkeypatch: pytest.MonkeyPatch, change: Any, expected: list[str]
) -> None:
    loaded = load_model("micro:bert", dtype="float32")
    forward = loaded.model.forward

    def changed(*args: Any, return_dict: bool = True, **inputs: Any) -> Any:
        given = forward(*args, return_dict=return_dict, **inputs)
        return given if return_dict else change(given)

    monkeypatch.setattr(loaded.model, "forward", changed)
    monkeypatch.setattr(models_under_test, "load_model", lambda *_, **__: loaded)
    found = tuple_differences("micro:bert", "cpu/float32")
    assert [line[: len(one)] for line, one in zip(found, expected, strict=True)] == expected


class Attention(nn.Module):
    """Three projections of one input. One has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8, bias=False)
        self.k = nn.Linear(8, 4)
        self.v = nn.Linear(8, 4, bias=False)
        self.out = nn.Linear(16, 7)

    def forward(self, inputs: Tensor) -> Tensor:
        read = torch.cat([self.q(inputs), self.k(inputs), self.v(inputs)], -1)
        given: Tensor = self.out(read.tanh())
        return given


class Model(nn.Module):
    """An embedding, an attention, and a separate projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.attention = Attention()
        self.head = nn.Linear(7, 16, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        given: Tensor = self.head(self.attention(self.embedding(input_ids)))
        return given


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().double()


IDS = torch.tensor([[3, 1, 4, 1, 5]])


def test_projections_of_one_input_are_fused_and_others_split(model: Model) -> None:
    expected = model(IDS)
    laid_out = other_layout(model)

    torch.testing.assert_close(laid_out(IDS), expected, rtol=1e-12, atol=1e-12)
    kinds = {name: type(part) for name, part in laid_out.named_modules()}
    assert [kinds[f"attention.{name}"] for name in "qkv"] == [FusedPart] * 3
    assert kinds["attention.out"] is kinds["head"] is TwoParts


def test_a_projection_that_runs_several_times_is_replaced_once() -> None:
    class Twice(Model):
        def forward(self, input_ids: Tensor) -> Tensor:
            hidden = self.attention(self.attention(self.embedding(input_ids))[..., [*range(7), 0]])
            given: Tensor = self.head(hidden)
            return given

    twice = Twice().double()
    expected = twice(IDS)
    torch.testing.assert_close(other_layout(twice)(IDS), expected, rtol=1e-12, atol=1e-12)


def test_rows_of_another_projection_change_the_output(model: Model) -> None:
    expected = model(IDS)
    attention = other_layout(model).get_submodule("attention")
    attention.k, attention.v = attention.v, attention.k

    assert (model(IDS) - expected).abs().max() > 1e-3


def test_model_without_projections_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Embedding has no torch\.nn\.Linear"):
        other_layout(OnlyEmbedding())


class OnlyEmbedding(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(16, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids)
