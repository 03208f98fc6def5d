"""Another layout of weights computes the same outputs."""

import pytest
import torch
from torch import Tensor, nn

from assay.errors import UsageError
from assay_expectations.models.layouts import FusedPart, TwoParts, other_layout


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
