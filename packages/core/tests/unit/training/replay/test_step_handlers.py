import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.errors import MachineError
from assay.hooks.tensors import Boundary
from assay.sites import Phase
from assay.stages import Stage
from assay.trace import Trace, TraceWriter
from assay.training.protocol import TrainingPlan
from assay.training.replay.step_handlers import (
    OptimizerResults,
    StageRecorder,
    StageReplayer,
    require_sums,
    step_adamw,
    sums_of,
)
from assay.training.replay.step_values import NORM, TRACE, RunRows, StepValues, ValueAddress
from assay.training.state.files import state_file, write_state

BOUNDARY = Boundary.exact_inputs_for(torch.bfloat16)
PLAN = TrainingPlan("", "cpu/float64", learning_rate=0.125, max_grad_norm=1.0)
# A step of AdamW from zero moments: decay by 1% of the learning rate, and a step of the learning rate
# against the sign of the gradient. Source: Loshchilov and Hutter, Decoupled Weight Decay, 2019.
WEIGHT, GRADIENT = torch.tensor([1.0, -2.0]).double(), torch.tensor([0.5, 0.25]).double()
UPDATE = -0.125 * (0.01 * WEIGHT + GRADIENT / (GRADIENT + 1e-8))
MOMENTS = {"exp_avg": 0.1 * GRADIENT, "exp_avg_sq": 0.001 * GRADIENT**2}
STATE = {"model": {"norm.weight": WEIGHT.bfloat16()}, "moments": {}}


def of_optimizer(what: str) -> ValueAddress:
    return ValueAddress(Stage("norm", "optimizer"), f"{what}.weight")


def results(plan: TrainingPlan = PLAN, gradient: Tensor | None = GRADIENT) -> OptimizerResults:
    return OptimizerResults(plan, 0, lambda: STATE, lambda module, name: gradient)


def test_first_step_follows_from_weight_and_gradient() -> None:
    found = results()

    update = found.find(of_optimizer("update"))
    assert update is not None
    assert torch.allclose(update, UPDATE, rtol=1e-12)
    for name, expected in MOMENTS.items():
        moment = found.find(of_optimizer(name))
        assert moment is not None
        assert torch.allclose(moment, expected, rtol=1e-12)


# The second has three blocks and a rest.
@pytest.mark.parametrize("size", [33, 3 * (1 << 16) + 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_are_those_of_torch_bit_for_bit(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(size, dtype=dtype))
    settings = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    optimizer: Any = torch.optim.AdamW([weight], **settings)  # type: ignore[arg-type]
    moments: dict[str, Tensor] = {}
    for _ in range(4):
        weight.grad = torch.randn(size, dtype=dtype) * 1e-3
        made, moments = step_adamw(weight, weight.grad, moments, settings, dtype)
        optimizer.step()
        assert torch.equal(made, weight)
        assert moments.keys() == optimizer.state[weight].keys()
        assert all(torch.equal(moments[key], optimizer.state[weight][key]) for key in moments)


def test_sums_of_many_blocks_are_those_of_the_whole() -> None:
    assert sums_of(torch.full((10, 25_000), -2.0)) == (1000.0, -500_000.0)


def test_patched_optimizer_does_not_change_what_is_expected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A setup function or a vendor's package may replace it in the candidate's process."""
    before = results().find(of_optimizer("update"))
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_: None)
    monkeypatch.setattr(torch.optim, "AdamW", torch.optim.SGD)
    for method in ("add", "mul", "div", "sqrt", "lerp", "addcmul", "addcdiv"):
        for name in (method, f"{method}_"):
            monkeypatch.setattr(torch.Tensor, name, lambda tensor, *_, **__: tensor.zero_())

    after = results().find(of_optimizer("update"))

    assert before is not None
    assert after is not None
    assert torch.equal(before, after)


def test_values_that_do_not_follow_are_not_found() -> None:
    assert results(gradient=None).find(of_optimizer("update")) is None
    assert results().find(of_optimizer("count-step")) is None
    other = ValueAddress(Stage("other", "optimizer"), "update.weight")
    assert results().find(other) is None


def record(folder: Path, optimizer: OptimizerResults, clipped: Tensor) -> StepValues:
    """Record a gradient of norm 4, what clipping makes of it, and one update of AdamW."""
    gradient = torch.tensor([[4.0, 2.0**-10]]).double()
    with TraceWriter(folder / TRACE, {}) as writer:
        handler = StageRecorder(writer, BOUNDARY, PLAN, optimizer)
        handler.begin_step(0)
        handler.observe(ValueAddress(Stage("norm", "backward"), "gradient.weight"), gradient)
        norm = ValueAddress(Stage("", "clip"), NORM)
        handler.observe(norm, torch.tensor([[4.0]]).double())
        handler.observe(ValueAddress(Stage("norm", "clip"), "gradient.weight"), clipped)
        found = results().find(of_optimizer("update"))
        assert found is not None
        handler.observe(of_optimizer("update"), found)
        handler.end_step()
    return StepValues.read(Trace.open(folder / TRACE), 0)


CLIPPED = torch.tensor([[4.0, 2.0**-10]]).double() * (1 / (4 + 1e-6))


def test_values_that_follow_are_left_out_and_read_all_the_same(tmp_path: Path) -> None:
    values = record(tmp_path, results(), CLIPPED)

    clip = ValueAddress(Stage("norm", "clip"), "gradient.weight")
    assert values.computed.keys() == {of_optimizer("update")}
    assert values.scaled[clip][1] == pytest.approx(0.25, rel=1e-6)
    assert {address.stage.phase for address in values.stored} == {"backward", "clip"}
    assert clip not in values.stored
    write_state(state_file(tmp_path, 0), STATE)
    replayer = StageReplayer(tmp_path, BOUNDARY, RunRows.of_counts([[1]]))
    replayer.begin_step(0)
    found = replayer.find(clip)
    assert found is not None
    assert torch.equal(found, CLIPPED.float())


@pytest.mark.parametrize("wrong", [WEIGHT, -UPDATE, UPDATE * (1 + 1e-5), UPDATE * math.nan])
def test_value_that_is_computed_otherwise_than_it_was_recorded_is_an_error(wrong: Tensor) -> None:
    require_sums(of_optimizer("update"), UPDATE * (1 + 1e-9), sums_of(UPDATE))

    with pytest.raises(MachineError, match="changes the arithmetic of the host"):
        require_sums(of_optimizer("update"), wrong, sums_of(UPDATE))


def test_values_that_another_rule_made_are_stored(tmp_path: Path) -> None:
    """A golden holds what its yardstick computed, also where this code expects other values."""
    wrong = results(replace(PLAN, learning_rate=0.25))
    values = record(tmp_path, wrong, CLIPPED * (1 + 2.0**-40))

    assert not values.computed
    assert not values.scaled
    assert of_optimizer("update") in values.stored
    assert ValueAddress(Stage("norm", "clip"), "gradient.weight") in values.stored


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
