"""Experts under replay: choices that rounding flips are no error, others are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody names it
from torch import Tensor, nn

from assay.comparing.results import PortResult
from assay.hooks.row_positions import RowIndex
from assay.locating.measuring import measure
from assay.sites import RowMap
from assay.stages import Stage
from packages.core.tests.unit.locating.conftest import MakeRig, Rig
from packages.core.tests.unit.locating.plants import do_nothing, replace_forward


class Router(nn.Module):
    """Chooses two of four experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16, generator=torch.Generator().manual_seed(3)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = F.linear(x.reshape(-1, 16), self.weight)
        weights, chosen = scores.softmax(-1).topk(2)
        return scores, weights, chosen


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()

    def forward(self, x: Tensor) -> Any:
        scores, weights, chosen = self.router(x.to(self.router.weight.dtype))
        return scores.gather(-1, chosen) * weights


@pytest.fixture
def experts_rig(make_rig: MakeRig, tensor: Callable[..., Tensor]) -> Rig:
    tokens = tensor(1, 4096, 16)
    return make_rig(Experts(), lambda model: model(tokens))


def test_choices_that_rounding_flips_are_left_out_and_counted(experts_rig: Rig) -> None:
    results = experts_rig.replay()

    chosen = results.ports["router", "output.2"].exact
    # Also rows whose two experts are only in the other order.
    assert 0 < chosen.num_near_ties < 80
    assert (chosen.num_compared, chosen.num_different) == (4096 - chosen.num_near_ties, 0)
    weights = results.ports["router", "output.1"].sums
    assert weights.num_elements == 2 * chosen.num_compared
    assert experts_rig.failed(do_nothing) == set()


def test_choice_of_a_clearly_worse_expert_is_an_error(experts_rig: Rig) -> None:
    def forward(_module: Any, original: Any, x: Tensor) -> Any:
        scores, weights, chosen = original(x)
        chosen = chosen.clone()
        chosen[7] = scores[7].argsort()[:2]
        return scores, weights, chosen

    items = experts_rig.judge(replace_forward("router", forward))

    failed = {(item.port.port, item.statistic) for item in items if item.failed}
    assert failed == {("output.2", "exact")}


def test_what_follows_gets_the_reference_s_choice(experts_rig: Rig) -> None:
    def forward(_module: Any, original: Any, x: Tensor) -> Any:
        scores, weights, chosen = original(x)
        return scores, weights, chosen.flip(-1).roll(1, 0)

    assert experts_rig.failed(replace_forward("router", forward)) == {"router"}


def test_experts_named_in_another_order_with_their_weights_are_the_same_choice(
    experts_rig: Rig,
) -> None:
    def forward(_module: Any, original: Any, x: Tensor) -> Any:
        scores, weights, chosen = original(x)
        return scores, weights.flip(-1), chosen.flip(-1)

    assert experts_rig.failed(replace_forward("router", forward)) == set()


def test_experts_named_in_another_order_without_their_weights_are_an_error(
    experts_rig: Rig,
) -> None:
    def forward(_module: Any, original: Any, x: Tensor) -> Any:
        scores, weights, chosen = original(x)
        return scores, weights, chosen.flip(-1)

    assert experts_rig.failed(replace_forward("router", forward)) == {"router"}


def test_near_ties_of_one_number_for_each_token_are_left_out() -> None:
    result = PortResult("router", "output.1", Stage("router", "forward"), 0, "float32", "")
    rows = RowMap((0, 1, 2), ((5,), (6,), (7,)))
    chosen = torch.tensor([[1], [2], [3]])

    measure(result, RowIndex(rows), rows, torch.tensor([True, False, False]), chosen + 1, chosen)

    assert result.exact.num_near_ties == 1
    assert (result.exact.num_compared, result.exact.num_different) == (2, 2)
    assert result.exact.first == (1, 6)
