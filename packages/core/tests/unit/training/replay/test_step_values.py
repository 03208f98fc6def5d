import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.errors import MachineError
from assay.hooks.tensors import Boundary
from assay.sites import CallSite, Phase
from assay.stages import Stage
from assay.trace import Trace, TraceWriter
from assay.training.protocol import TrainingPlan
from assay.training.replay import step_values
from assay.training.replay.step_values import (
    NORM,
    TRACE,
    OptimizerResults,
    RankScope,
    RunRows,
    StageRecorder,
    StageReplayer,
    StepValues,
    StepWriter,
    ValueAddress,
    count_rows,
    require_sums,
    step_adamw,
    sums_of,
)
from assay.training.state.files import state_file, write_state
from assay.training.state.parameters import PartialSums


def test_rows_of_a_run_are_numbered_one_after_the_other() -> None:
    batches = [[{"labels": torch.zeros(count, 5)} for count in step] for step in ([2, 3], [1])]
    rows = RunRows.of_batches(batches)

    assert count_rows(batches) == [[2, 3], [1]]
    assert rows.of_micro_batch(0, 0, 2) == (0, 1)
    assert rows.of_micro_batch(0, 1, 3) == (2, 3, 4)
    assert rows.of_micro_batch(1, 0, 1) == (5,)
    assert [rows.step_of(row) for row in range(6)] == [0, 0, 0, 0, 0, 1]


def test_rows_of_many_micro_batches_have_numbers_of_their_own() -> None:
    rows = RunRows.of_counts([[2] * 1500] * 3)

    numbers = [
        (row, step)
        for step in range(3)
        for micro_batch in range(1500)
        for row in rows.of_micro_batch(step, micro_batch, 2)
    ]

    assert [row for row, _ in numbers] == list(range(3 * 1500 * 2))
    assert [step for _, step in numbers] == [rows.step_of(row) for row, _ in numbers]


@pytest.mark.parametrize(
    ("micro_batch", "count", "numbers"), [(1, 3, (2, 3, -1)), (1, 1, (2,)), (2, 2, (-1, -1))]
)
def test_rows_that_are_not_planned_have_no_number(
    micro_batch: int, count: int, numbers: tuple[int, ...]
) -> None:
    assert RunRows.of_counts([[2, 2]]).of_micro_batch(0, micro_batch, count) == numbers


@pytest.mark.parametrize("part_bytes", [1, 1 << 20])
def test_values_of_a_step_are_read_back_as_they_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr(step_values, "_PART_BYTES", part_bytes)
    made = ValueAddress(Stage("a|b", "backward"), "gradient.weight", kind="Linear")
    left = ValueAddress(Stage("a|b", "reduce"), "gradient.weight")
    loss = ValueAddress(Stage("", "forward"), "loss", 1)
    tensors = {made: torch.ones(2), loss: torch.zeros(1, 1)}
    states = {"generator.0": torch.tensor([7]), "generator.1": torch.tensor([8])}
    with TraceWriter(tmp_path / "trace", {}) as writer:
        step = StepWriter(writer, 3)
        for address, value in tensors.items():
            step.store(address, value)
        step.scale(left, made, 1)
        for name, state in states.items():
            step.store_state(name, state)
        step.finish()

    read = StepValues.read(Trace.open(tmp_path / "trace"), 3)

    assert read.addresses == (made, loss, left)
    assert read.scaled == {left: (made, 1)}
    assert all(torch.equal(read.stored[address], value) for address, value in tensors.items())
    assert all(torch.equal(read.states[name], state) for name, state in states.items())


LAYER = "model.layers.0.mlp"


def calls(scope: RankScope, module: str, micro_batch: int) -> bool:
    return scope.is_own_call(CallSite(0, module, micro_batch=micro_batch))


def values(scope: RankScope, module: str, port: str, index: int = 0) -> bool:
    return scope.is_own_value(0, ValueAddress(Stage(module, "backward"), port, index))


def test_rank_answers_for_the_micro_batches_that_it_ran() -> None:
    scope = RankScope(micro_batches_run={(0, 1)})

    assert calls(scope, LAYER, 1)
    assert not calls(scope, LAYER, 0)
    assert values(scope, "", "labels", 1)
    assert not values(scope, "", "labels", 0)


def test_every_rank_answers_for_the_values_of_the_whole_step() -> None:
    scope = RankScope(micro_batches_run={(0, 1)})

    assert values(scope, LAYER, "gradient.weight")
    assert values(scope, "", "norm")


def test_stage_answers_for_the_modules_that_it_has_whole() -> None:
    scope = RankScope(
        modules=frozenset({"", "model", LAYER}),
        partial_modules=frozenset({"", "model"}),
        micro_batches_run={(0, 0)},
    )

    assert calls(scope, LAYER, 0)
    assert not calls(scope, "model.layers.1.mlp", 0)
    assert not calls(scope, "model", 0)
    assert values(scope, LAYER, "gradient.weight")
    assert not values(scope, "model.layers.1.mlp", "gradient.weight")
    assert values(scope, "", "norm")
    assert not values(scope, "", "loss")


def test_own_part_of_a_state_is_what_the_stage_has() -> None:
    whole = {
        "model": {f"{LAYER}.weight": 1, "lm_head.weight": 2},
        "moments": {f"{LAYER}.weight": {"exp_avg": 3}, "lm_head.weight": {"exp_avg": 4}},
        "generators": {"torch": 5},
    }
    scope = RankScope(modules=frozenset({LAYER}))

    assert scope.own_part(whole) == {
        "model": {f"{LAYER}.weight": 1},
        "moments": {f"{LAYER}.weight": {"exp_avg": 3}},
        "generators": {"torch": 5},
    }


def test_shares_of_a_sum_differ_and_add_up_to_it_exactly() -> None:
    def group(rank: int) -> Any:
        return SimpleNamespace(size=lambda: 3, rank=lambda: rank)

    total = torch.randn(5, 7).bfloat16().double()
    shares = [PartialSums(group(rank)).share(total, torch.bfloat16) for rank in range(3)]

    in_dtype = [share.bfloat16() for share in shares]
    assert torch.equal((in_dtype[0] + in_dtype[1] + in_dtype[2]).double(), total)
    assert all(not torch.equal(3 * share, total) for share in shares)
    assert all(bool(share.any()) for share in shares)


def test_shares_of_a_sum_are_distinguished_from_their_largest_and_from_a_mean_of_some() -> None:
    def group(rank: int) -> Any:
        return SimpleNamespace(size=lambda: 2, rank=lambda: rank)

    total = torch.randn(16, dtype=torch.float64)
    shares = torch.stack([PartialSums(group(rank)).share(total, torch.float32) for rank in (0, 1)])

    assert torch.equal(shares.sum(0), total)
    largest = shares.gather(0, shares.abs().argmax(0, keepdim=True))[0]
    mean_of_some = shares.sum(0) / (shares != 0).sum(0)
    for other in (largest, mean_of_some):
        assert int((other != total).sum()) >= 4


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
