"""What backward passes give a parameter, beside the sum that a trainer makes of it."""

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import Tensor, nn

from assay.training.replay.parameter_watch import (
    GradientSums,
    ObservedGradients,
    UpdateWatch,
    shares_of_ranks,
)
from assay.training.replay.step_values import StepValueHandler, ValueAddress, address_of
from assay.training.reports import GradientFindings, MovedElements
from assay.training.state.parameters import NamedParameter, named_parameters

if TYPE_CHECKING:
    from assay.training.protocol import Trainer
    from assay.training.state.parameters import PartialSums


UNIT = 2.0**-24


def weights() -> list[NamedParameter]:
    torch.manual_seed(0)
    return [
        NamedParameter(name, "", "", nn.Parameter(torch.randn(64))) for name in ("first", "second")
    ]


def give(parameters: list[NamedParameter], factor: float) -> None:
    """One backward pass."""
    generator = torch.Generator().manual_seed(int(100 * factor))
    for item in parameters:
        (item.tensor * torch.randn(64, generator=generator) * factor).sum().backward()


def test_sum_of_all_backward_passes_is_right_to_its_own_rounding() -> None:
    parameters, sums = weights(), GradientSums()

    for _ in range(2):  # steps
        sums.begin_step(parameters)
        for item in parameters:
            item.tensor.grad = None
        for factor in (0.5, 1.0, 0.25):
            give(parameters, factor)
        sums.compare(parameters)

    assert sums.found.errors_of_sums.keys() == {"first", "second"}
    assert max(sums.found.errors_of_sums.values()) <= 4 * 3 * UNIT


def test_sum_without_one_of_two_equal_parts_is_off_by_the_root_of_a_half() -> None:
    parameters, sums = weights(), GradientSums()

    sums.begin_step(parameters)
    give(parameters, 1.0)
    parameters[1].tensor.grad = None
    give(parameters, 1.0)
    sums.compare(parameters)

    # |g| is missing, and the root of the squares is |g| * sqrt(2).
    assert sums.found.errors_of_sums == {"first": 0.0, "second": pytest.approx(0.5**0.5, rel=1e-6)}


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_a_sum_that_became_nan_stays_wrong_in_later_steps(factor: float) -> None:
    parameters, sums = weights(), GradientSums()

    for value in (math.nan, 1.0):
        sums.begin_step(parameters)
        for item in parameters:
            item.tensor.grad = None
        give(parameters, factor)
        gradient = parameters[0].tensor.grad
        assert gradient is not None
        gradient.mul_(value)
        sums.compare(parameters)

    assert not sums.found.errors_of_sums["first"] <= 0.5
    assert sums.found.errors_of_sums["second"] == pytest.approx(0.0, abs=4 * UNIT)


def test_sum_that_is_rounded_to_16_bits_is_off_by_their_rounding() -> None:
    parameters, sums = weights(), GradientSums()

    sums.begin_step(parameters)
    for factor in (0.5, 1.0):
        give(parameters, factor)
        gradient = parameters[0].tensor.grad
        assert gradient is not None
        gradient.copy_(gradient.bfloat16())
    sums.compare(parameters)

    # Rounding to nearest is off by up to a unit, 2**-8, and by its third part in the mean of squares.
    assert 2.0**-11 < sums.found.errors_of_sums["first"] < 2.0**-8
    assert sums.found.errors_of_sums["second"] <= 4 * 2 * UNIT


def test_what_is_given_after_the_comparison_counts_for_no_step() -> None:
    parameters, sums = weights(), GradientSums()

    sums.begin_step(parameters)
    give(parameters, 1.0)
    sums.compare(parameters)
    give(parameters, 1.0)

    assert max(sums.found.errors_of_sums.values()) == 0.0


def test_parameter_without_any_gradient_has_no_sum() -> None:
    parameters, sums = weights(), GradientSums()

    sums.begin_step(parameters)
    give(parameters[:1], 1.0)
    sums.compare(parameters)

    assert sums.found.errors_of_sums == {"first": 0.0}


class TwoRanks:
    """Sums over two ranks that were given the same."""

    num_ranks = 2

    def total(self, value: torch.Tensor) -> torch.Tensor:
        return 2 * value.double()


def test_mean_over_ranks_is_as_right_as_their_sum() -> None:
    parameters, sums = weights(), GradientSums(over_ranks=cast("PartialSums", TwoRanks()))

    sums.begin_step(parameters)
    give(parameters, 1.0)
    summed = parameters[0].tensor.grad
    assert summed is not None
    summed *= 2  # the other one is the mean: what each rank was given
    sums.compare(parameters)

    assert max(sums.found.errors_of_sums.values()) <= 4 * 2 * UNIT


def test_mean_that_lacks_a_part_is_no_mean() -> None:
    parameters, sums = weights(), GradientSums(over_ranks=cast("PartialSums", TwoRanks()))

    sums.begin_step(parameters)
    give(parameters, 1.0)
    give(parameters, 1.0)
    for item in parameters:
        assert item.tensor.grad is not None
        item.tensor.grad /= 2  # one of the two parts, or half of all: neither sum nor mean
    sums.compare(parameters)

    # The sum is 4 g and the mean 2 g, of which g is half: as far off as the root of 4 squares of g.
    assert sums.found.errors_of_sums["first"] == pytest.approx(1.0, rel=1e-6)


def shares_after(factors: tuple[float, ...], zeroed_before: int | None = None) -> dict[int, float]:
    """What is found of passes of micro-batches 0, 1, ...; one may begin with gradients of zero."""
    parameters, begun = weights(), [0]
    sums = GradientSums(micro_batches_begun=lambda: begun)
    sums.begin_step(parameters)
    for number, factor in enumerate(factors):
        if number == zeroed_before:
            for item in parameters:
                item.tensor.grad = None
        begun[:] = [number]
        give(parameters, factor)
        sums.end_pass()
    sums.compare(parameters)
    return sums.in_sum


def test_every_pass_is_once_in_its_sum() -> None:
    assert shares_after((0.5, 1.0, 0.25)) == pytest.approx({0: 1.0, 1: 1.0, 2: 1.0})


def test_passes_before_gradients_are_set_to_zero_are_not_in_the_sum() -> None:
    assert shares_after((0.5, 1.0, 0.25), zeroed_before=2) == pytest.approx(
        {0: 0.0, 1: 0.0, 2: 1.0}, abs=1e-6
    )


def test_gradients_that_are_no_sum_of_passes_have_no_shares() -> None:
    parameters, sums = weights(), GradientSums(micro_batches_begun=lambda: [0])
    sums.begin_step(parameters)
    give(parameters, 1.0)
    sums.end_pass()
    for item in parameters:
        item.tensor.grad = torch.ones(64)
    sums.compare(parameters)

    assert sums.in_sum == {}


@pytest.mark.parametrize("cleared", [(), ("first",)], ids=["none", "one of two"])
def test_gradients_that_nothing_clears_are_once_in_the_next_sum(cleared: tuple[str, ...]) -> None:
    parameters, sums = weights(), GradientSums(micro_batches_begun=lambda: [0])
    for factor in (1.0, 0.5):  # steps
        sums.begin_step(parameters)
        for item in parameters:
            if item.name in cleared:
                item.tensor.grad = None
        give(parameters, factor)
        sums.end_pass(parameters)
        sums.compare(parameters)

    share, names = sums.kept
    assert share == pytest.approx(1.0)
    assert names == [name for name in ("first", "second") if name not in cleared]
    assert sums.in_sum == pytest.approx({0: 1.0})


def test_gradients_that_are_cleared_between_passes_are_not_kept() -> None:
    parameters, begun = weights(), [0]
    sums = GradientSums(micro_batches_begun=lambda: begun)
    for factor in (0.25, 1.0):  # steps
        sums.begin_step(parameters)
        for number in range(2):
            begun[:] = [number]
            for item in parameters:
                item.tensor.grad = item.tensor.grad if number == 0 else None
            give(parameters, factor * (1 + number))
            sums.end_pass(parameters)
        sums.compare(parameters)

    assert sums.kept[0] == pytest.approx(0.0, abs=1e-6)
    assert sums.in_sum == pytest.approx({0: 0.0, 1: 1.0}, abs=1e-6)


def test_gradient_that_changes_after_the_last_pass_is_told_by_how_much() -> None:
    parameters, sums = weights(), GradientSums(micro_batches_begun=lambda: [0])
    sums.begin_step(parameters)
    give(parameters, 1.0)
    sums.end_pass(parameters)
    assert parameters[1].tensor.grad is not None
    parameters[1].tensor.grad *= 1.5
    sums.compare(parameters)

    assert sums.found.changed == {"second": pytest.approx(0.5)}


@pytest.mark.parametrize(("lost", "shares"), [(False, (1.0, 1.0)), (True, (0.0, 1.0))])
def test_clipped_gradients_show_their_passes_though_no_method_does(
    lost: bool, shares: tuple[float, float]
) -> None:
    parameters, begun = weights(), [0]
    sums = GradientSums(micro_batches_begun=lambda: begun)
    sums.begin_step(parameters)
    give(parameters, 1.0)
    for item in parameters:
        item.tensor.grad = None if lost else item.tensor.grad
    begun.append(1)  # of the second pass, besides the first
    give(parameters, 0.5)
    for item in parameters:
        assert item.tensor.grad is not None
        item.tensor.grad *= 0.125
    sums.compare(parameters, is_clipped=True)

    assert sums.in_sum == pytest.approx({0: shares[0], 1: shares[1]}, abs=1e-6)
    assert not sums.found.errors_of_sums  # a clipped gradient is no sum


def test_clipped_gradient_of_another_factor_than_most_has_changed() -> None:
    torch.manual_seed(0)
    parameters = [
        NamedParameter(name, "", "", nn.Parameter(torch.randn(64))) for name in ("a", "b", "c")
    ]
    sums = GradientSums(micro_batches_begun=lambda: [0])
    sums.begin_step(parameters)
    give(parameters, 1.0)
    for item in parameters:
        assert item.tensor.grad is not None
        item.tensor.grad *= 0.375 if item.name == "b" else 0.25
    sums.compare(parameters, is_clipped=True)

    assert sums.found.changed == {"b": pytest.approx(0.5)}


def products(*shares: float) -> torch.Tensor:
    """Products and squares of one parameter whose ranks have these shares, (2, ranks)."""
    return torch.tensor([shares, [1.0] * len(shares)], dtype=torch.float64)


def test_a_share_that_all_parameters_have_is_the_rank_s() -> None:
    assert shares_of_ranks([products(1, 0), products(1, 0.02)]) == pytest.approx([1, 0.01])


def test_a_share_of_some_parameters_only_belongs_to_no_rank() -> None:
    assert shares_of_ranks([products(1, 1), products(1, 0)]) == [1, 1]


def test_without_ranks_there_are_no_shares() -> None:
    assert shares_of_ranks([]) == []


RATE = 0.5


class Seen(StepValueHandler):
    """A handler that keeps what it is shown, and whose reference moves every element by -RATE."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def observe(self, address: ValueAddress, value: Tensor) -> Tensor:
        self.values[f"{address.stage.module}:{address.port}"] = value
        is_update = address.port.startswith("update.")
        return torch.full_like(value, -RATE) if is_update else value


def make_step(watch: UpdateWatch, *, later: float = 0.0, frozen: float = 0.0) -> dict[str, Tensor]:
    """One step of momentum on ones; `later`, `frozen`: what changes after it."""
    trainer: Any = watch.trainer
    watch.begin_step()
    trained = watch.trained()
    trainer.model.weight.grad = torch.ones_like(trainer.model.weight)
    trainer.optimizer.step()
    watch.observe_updates(trained)
    with torch.no_grad():
        trainer.model.weight[0, 0] += later
        trainer.model.bias += frozen
    watch.end_step()
    return cast("Seen", watch.handler).values


@pytest.fixture
def watch() -> UpdateWatch:
    model = nn.Linear(4, 3)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([model.weight], lr=RATE, momentum=0.9)
    made: Any = SimpleNamespace(model=model, optimizer=optimizer)
    return UpdateWatch(cast("Trainer", made), Seen())


def test_update_is_the_change_since_the_step_began(watch: UpdateWatch) -> None:
    values = make_step(watch)

    assert torch.allclose(values[":update.weight"], torch.full((3, 4), -RATE).double())
    assert torch.equal(values[":momentum_buffer.weight"], torch.ones(3, 4))
    assert int(values[":changed-later.weight"]) == 0
    assert int(values[":changed-untrained"]) == 0


@pytest.mark.parametrize(
    ("changed", "port"),
    [({"later": 1.0}, ":changed-later.weight"), ({"frozen": 1.0}, ":changed-untrained")],
)
def test_what_changes_beside_the_update_is_counted(
    watch: UpdateWatch, changed: dict[str, float], port: str
) -> None:
    assert int(make_step(watch, **changed)[port]) == 1


def test_elements_that_an_update_leaves_where_they_are_are_not_moved(watch: UpdateWatch) -> None:
    with torch.no_grad():
        # In float32 half of 1 is no change of 2**26.
        cast("Any", watch.trainer).model.weight[0] = 2.0**26

    make_step(watch)

    assert watch.moved == MovedElements(num_expected=12, num_moved=8)


@pytest.mark.parametrize(
    ("expected", "found", "phase"),
    [
        (1.0, 1.0, "clip"),
        (1.0, 4.0, "backward"),
        (4.0, 4.0, "clip"),  # not clipped: rounding decides which norm is nearer
        (4.001, 4.0, "clip"),
    ],
)
def test_gradients_of_a_step_without_clipping_are_those_after_it(
    expected: float, found: float, phase: str
) -> None:
    model = nn.Linear(1, 1, bias=False)
    model.weight.grad = torch.tensor([[found]])
    address = address_of(named_parameters(model)[0], "clip", "gradient")
    handler: Any = SimpleNamespace(
        expected=lambda _: [address],
        find=lambda _: torch.tensor([[expected]]),
        loss_scale=SimpleNamespace(of_gradients=1.0),
    )
    observed = ObservedGradients(handler, frozenset(), GradientFindings())
    assert observed.last_phase(model, torch.tensor(4.0)) == phase
