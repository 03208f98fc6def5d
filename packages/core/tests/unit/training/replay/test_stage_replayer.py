from pathlib import Path

import pytest
import torch
from torch import Tensor

from assay.hooks.tensors import Boundary
from assay.sites import Phase
from assay.stages import Stage
from assay.trace import Trace, TraceWriter
from assay.training.replay.run_rows import RunRows
from assay.training.replay.stage_handlers import StageRecorder, StageReplayer
from assay.training.replay.stage_values import TRACE, ValueAddress

BOUNDARY = Boundary.exact_inputs_for(torch.bfloat16)
ROWS = RunRows.of_counts([[2]])


def address(phase: Phase = "reduce", port: str = "gradient.weight", index: int = 0) -> ValueAddress:
    return ValueAddress(Stage("model.norm", phase), port, index)


@pytest.fixture
def recorded(tmp_path: Path) -> StageReplayer:
    """One step with the gradient 1 + 2**-10, whose last bit bfloat16 cannot hold."""
    with TraceWriter(tmp_path / "trace", {}) as writer:
        handler = StageRecorder(writer, BOUNDARY)
        handler.begin_step(0)
        value = torch.full((2, 4), 1 + 2.0**-10, dtype=torch.float64)
        injected = handler.observe(address(), value)
        assert torch.equal(injected, torch.ones_like(value))
        handler.observe(address("clip"), injected)
        handler.observe(address("inputs", "labels"), torch.tensor([[1, 2, -100]]))
        handler.observe_state("generator.0", torch.get_rng_state())
        handler.end_step()
    return StageReplayer(tmp_path, BOUNDARY, ROWS)


def observe(replayer: StageReplayer, value: Tensor) -> Tensor:
    replayer.begin_step(0)
    return replayer.observe(address(), value)


def test_error_is_against_the_exact_value_and_the_rounded_one_is_injected(
    recorded: StageReplayer,
) -> None:
    injected = observe(recorded, torch.full((2, 4), 1.5, dtype=torch.bfloat16))

    assert torch.equal(injected, torch.ones(2, 4, dtype=torch.bfloat16))
    recorded.results["reduce"].flush()
    sums = recorded.results["reduce"].ports["model.norm", "gradient.weight"].sums
    assert sums.relative_error == pytest.approx((0.5 - 2**-10) / (1 + 2**-10))
    assert sums.worst_row()[1] == 0


@pytest.mark.parametrize(("actual", "error"), [(1.0, 0.0), (1.5, 0.5)])
def test_what_a_phase_leaves_as_it_was_is_stored_once_and_compared_all_the_same(
    recorded: StageReplayer, actual: float, error: float
) -> None:
    stored = Trace.open(recorded.golden / TRACE).attachment("step-0-0").values()
    assert [tuple(tensor.shape) for tensor in stored if tensor.is_floating_point()] == [(2, 4)]

    recorded.begin_step(0)
    injected = recorded.observe(address("clip"), torch.full((2, 4), actual, dtype=torch.bfloat16))

    assert torch.equal(injected, torch.ones(2, 4, dtype=torch.bfloat16))
    recorded.results["clip"].flush()
    sums = recorded.results["clip"].ports["model.norm", "gradient.weight"].sums
    assert sums.relative_error == error


def test_value_that_is_never_observed_is_unmatched(recorded: StageReplayer) -> None:
    recorded.begin_step(0)
    recorded.end_step()

    for phase in ("reduce", "clip"):
        assert recorded.results[phase].unmatched_expected == ["model.norm:gradient.weight"]
    assert recorded.results["inputs"].unmatched_expected == ["model.norm:labels"]


def test_value_that_nobody_expects_is_listed_and_left_as_it_is(recorded: StageReplayer) -> None:
    recorded.begin_step(0)
    value = torch.ones(3)

    assert recorded.observe(address(port="gradient.bias"), value) is value
    assert recorded.results["reduce"].unmatched_actual == ["model.norm:gradient.bias"]


def test_another_shape_is_a_difference(recorded: StageReplayer) -> None:
    observe(recorded, torch.ones(4, 2))

    exact = recorded.results["reduce"].ports["model.norm", "gradient.weight"].exact
    assert (exact.num_compared, exact.num_different) == (1, 1)


def test_labels_are_compared_one_by_one(recorded: StageReplayer) -> None:
    recorded.begin_step(0)
    recorded.observe(address("inputs", "labels"), torch.tensor([[1, 3, -100]]))

    exact = recorded.results["inputs"].ports["model.norm", "labels"].exact
    assert (exact.num_compared, exact.num_different, exact.first) == (3, 1, (0, -1))


def test_state_is_injected_and_not_judged(recorded: StageReplayer) -> None:
    recorded.begin_step(0)
    expected = torch.get_rng_state()
    torch.rand(7)
    state = recorded.observe_state("generator.0", torch.get_rng_state())
    torch.set_rng_state(state)

    assert torch.equal(torch.get_rng_state(), expected)
    assert all(not results.ports for results in recorded.results.values())


def test_expected_lists_the_addresses_of_a_phase(recorded: StageReplayer) -> None:
    recorded.begin_step(0)

    assert list(recorded.expected("reduce")) == [address()]
    assert list(recorded.expected("clip")) == [address("clip")]
    assert list(recorded.expected("backward")) == []


def test_sum_over_micro_batches_is_measured_as_one_value(tmp_path: Path) -> None:
    parts = [address("forward", "loss", number) for number in (0, 1)]
    with TraceWriter(tmp_path / "trace", {}) as writer:
        handler = StageRecorder(writer, BOUNDARY)
        handler.begin_step(0)
        for part, value in zip(parts, (1.0, 3.0), strict=True):
            handler.observe(part, torch.tensor([[value]], dtype=torch.float64))
        handler.end_step()
    replayer = StageReplayer(tmp_path, BOUNDARY, ROWS)
    replayer.begin_step(0)

    replayer.observe_sum(parts, torch.tensor([[5.0]]))
    replayer.end_step()

    results = replayer.results["forward"]
    results.flush()
    assert results.ports["model.norm", "loss"].sums.relative_error == 0.25
    assert not results.unmatched_expected
