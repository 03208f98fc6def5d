"""Steps by the conventions of real trainers, replayed: a tiny model, recorded in float64."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.hooks.tensors import Boundary
from assay.judge.results import read_results
from assay.recording.modules import Recorder
from assay.replay.gradients import LossScale, ScaledStep
from assay.trace import Trace, TraceWriter
from assay.training.processes.free_run import step_until_made
from assay.training.protocol import MicroBatch, StepReport, TrainingPlan
from assay.training.replay.determinism import comparable
from assay.training.replay.step_observer import ReplayedSteps, StepObserver
from assay.training.replay.step_values import TRACE, RankScope, RunRows, StageRecorder
from assay.training.state.parameters import PartialSums
from assay.training.state.states import collect_state, inject_state
from assay.training.trainers.reference import ReferenceTrainer
from assay.training.trainers.registry import OpenedTrainer

BOUNDARY = Boundary.exact_inputs_for(torch.float32)
SCALE = 8.0
# Of any type: the field that is compared with it is a number.
APPROXIMATELY_ONE: Any = pytest.approx(1.0)
UNIT = 2.0**-24
GROUPS = ("modules", "gradients", *(f"stage-{phase}" for phase in (
    "inputs", "forward", "backward", "reduce", "clip", "optimizer"
)))  # fmt: skip


@cache
def tiny_model() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def micro_batch(*lengths: int, padded: str = "right") -> MicroBatch:
    ids = torch.randint(1, 32, (len(lengths), max(lengths)))
    mask = torch.tensor([[1] * n + [0] * (max(lengths) - n) for n in lengths])
    mask = mask if padded == "right" else mask.flip(1)
    first = (mask == 1) & (mask.cumsum(1) == 1)
    labels = ids.masked_fill((mask == 0) | first, -100)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


@cache
def batch() -> list[MicroBatch]:
    torch.manual_seed(1)
    return [micro_batch(7, 4), micro_batch(9, 5, padded="left")]


class Plain(ReferenceTrainer):
    dtype = torch.float32

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        del plan
        return copy.deepcopy(tiny_model()).to(self.dtype).train()


class Yardstick(Plain):
    dtype = torch.float64


class Scaled(Plain):
    def backward(self, loss: Tensor) -> None:
        super().backward(loss * SCALE)

    def unscale(self) -> None:
        for parameter in self._trained():
            assert parameter.grad is not None
            parameter.grad /= SCALE


class UnscaledInReduce(Scaled):
    def reduce_gradients(self) -> None:
        self.unscale()


class UnscaledInClip(Scaled):
    def clip_gradients(self, max_norm: float) -> float:
        self.unscale()
        return super().clip_gradients(max_norm)


class ClippedFirst(Scaled):
    def optimizer_step(self) -> None:
        self.unscale()
        super().optimizer_step()


class LossReturnedTwice(Plain):
    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        return 2 * super().compute_loss(micro_batch, num_step_tokens)

    def backward(self, loss: Tensor) -> None:
        super().backward(loss / 2)


class OtherMask(Plain):
    """Changes the mask of one micro-batch: 0 is padded on the right, 1 on the left."""

    def __init__(self, number: int, change: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.number, self.change = number, change

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        is_changed = torch.equal(micro_batch["input_ids"], batch()[self.number]["input_ids"])
        if not is_changed:
            return super().compute_loss(micro_batch, num_step_tokens)
        mask = self.change(micro_batch["attention_mask"])
        named = {name: one for name, one in micro_batch.items() if name != "attention_mask"}
        given = named if mask is None else {**named, "attention_mask": mask}
        return super().compute_loss(given, num_step_tokens)


class Concatenated(Plain):
    def train_on(self, own: Sequence[MicroBatch], num_tokens: int) -> float:
        length = max(one["input_ids"].shape[1] for one in own)
        padding = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        together = {
            name: torch.cat(
                [
                    nn.functional.pad(one[name], (0, length - one[name].shape[1]), value=value)
                    for one in own
                ]
            )
            for name, value in padding.items()
        }
        return super().train_on([together], num_tokens)


class EndToEnd(Plain):
    """Rows in one row, with positions of their own."""

    names: tuple[str, ...] = ("input_ids", "position_ids")

    def train_on(self, own: Sequence[MicroBatch], num_tokens: int) -> float:
        rows = [
            {name: one[name][row][one["attention_mask"][row] != 0] for name in one}
            for one in own
            for row in range(len(one["input_ids"]))
        ]
        for row in rows:
            row["position_ids"] = torch.arange(len(row["labels"]))
        packed = {name: torch.cat([row[name] for row in rows])[None] for name in rows[0]}
        return super().train_on([packed], num_tokens)

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        logits = self.network(**{name: micro_batch[name] for name in self.names}).logits
        return (
            nn.functional.cross_entropy(
                logits[0, :-1], micro_batch["labels"][0, 1:], reduction="sum"
            )
            / num_step_tokens
        )


class RowsSeeEachOther(EndToEnd):
    names = ("input_ids",)


class SkipsOnce(UnscaledInClip):
    """The first try overflows."""

    tries = 0

    def backward(self, loss: Tensor) -> None:
        super().backward(loss * (1.0 if self.tries else torch.inf))

    def optimizer_step(self) -> None:
        if self.tries:
            super().optimizer_step()

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        report = super().step(batch)
        self.tries += 1
        return replace(report, skipped=self.tries == 1)


def opened(trainer: ReferenceTrainer) -> OpenedTrainer:
    # A learning rate at which weights keep most of their bits; a norm that is always clipped.
    trainer.setup(TrainingPlan("tiny", "cpu/float32", learning_rate=1e-2, max_grad_norm=0.1))
    return OpenedTrainer.of(trainer, "tiny")


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    made = opened(Yardstick())
    with TraceWriter(folder / TRACE, {}) as writer:
        handler = StageRecorder(writer, BOUNDARY)
        observer = StepObserver(made, handler, Recorder(writer, BOUNDARY), rows())
        with observer.attached(), comparable("float64", open_run(parse_run("cpu/float64"))):
            observer.run_step(0, batch())
    return folder


def rows() -> RunRows:
    return RunRows.of_batches([batch()])


def replay(
    trainer: ReferenceTrainer,
    golden: Path,
    folder: Path,
    loss_scale: LossScale | None = None,
    scope: RankScope | None = None,
) -> tuple[dict[tuple[str, str, str], float], ReplayedSteps]:
    """By group, module and port the error of one replayed step."""
    made = opened(trainer)
    state = collect_state(trainer, "cpu")
    steps = ReplayedSteps(
        made, golden, rows(), BOUNDARY, frozenset(), scope=scope, loss_scale=loss_scale
    )
    with steps.attached(), comparable("float32", open_run(parse_run("cpu/float32"))):
        inject_state(trainer, state, "cpu")
        before = steps.measured()

        def begin_again() -> None:
            steps.go_back_to(before)
            inject_state(trainer, state, "cpu")

        step_until_made(lambda: steps.run_step(0, batch()), begin_again)
    with TraceWriter(folder, {}) as writer:
        steps.write(writer)
    trace: Any = Trace.open(folder)
    results = {name: read_results(trace, name) for name in GROUPS}
    assert [name for name, one in results.items() if one.unmatched_expected] == []
    errors = {
        (name, *key): max(
            port.sums.relative_error if port.sums.num_elements else 0.0,
            port.exact.num_different / max(port.exact.num_compared, 1),
        )
        for name, one in results.items()
        for key, port in one.ports.items()
    }
    return errors, steps


def wrong(errors: dict[tuple[str, str, str], float]) -> set[tuple[str, str, str]]:
    return {place for place, error in errors.items() if not error < 1e-4}


@pytest.mark.parametrize("kind", [Plain, Concatenated, EndToEnd])
def test_step_agrees_with_the_recorded_one(
    kind: type[ReferenceTrainer], golden: Path, tmp_path: Path
) -> None:
    errors, steps = replay(kind(), golden, tmp_path / "replay")

    assert wrong(errors) == set()
    assert steps.found.micro_batches_run == [(0, 0), (0, 1)]
    assert len(steps.packings) == (kind is not Plain)


@pytest.mark.parametrize(
    ("number", "change", "is_wrong"),
    [
        (0, torch.ones_like, False),  # causal attention never reads padding on the right
        (0, lambda _: None, False),
        (1, torch.ones_like, True),
        (1, lambda _: None, True),
        (1, torch.Tensor.bool, False),
        (1, torch.Tensor.float, False),
        (1, lambda mask: mask * 3, False),  # numbers of packed rows
        (1, lambda mask: mask.float().fill_(1), True),
        (0, lambda mask: mask.index_fill(1, torch.tensor([2]), 0), True),
    ],
)
def test_mask_of_padding_is_compared_where_attention_reads_it(
    number: int, change: Callable[[Tensor], Tensor | None], is_wrong: bool, golden: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    errors, _ = replay(OtherMask(number, change), golden, tmp_path / "replay")

    assert wrong(errors) == ({("modules", "", "input.attention_mask")} if is_wrong else set())


def test_rows_that_see_each_other_are_found_in_the_mask(golden: Path, tmp_path: Path) -> None:
    errors, _ = replay(RowsSeeEachOther(), golden, tmp_path / "replay")

    assert ("modules", "model.layers.0", "input.attention_mask") in wrong(errors)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (UnscaledInReduce, ScaledStep(0, SCALE, 1.0, "reduce", left=APPROXIMATELY_ONE)),
        (UnscaledInClip, ScaledStep(0, SCALE, 1.0, "clip", APPROXIMATELY_ONE, APPROXIMATELY_ONE)),
        (SkipsOnce, ScaledStep(0, SCALE, 1.0, "clip", APPROXIMATELY_ONE, APPROXIMATELY_ONE)),
        (LossReturnedTwice, ScaledStep(0, 1.0, 2.0, None, APPROXIMATELY_ONE)),
    ],
)
def test_scale_is_divided_out_until_it_is_taken_off(
    kind: type[ReferenceTrainer], expected: ScaledStep, golden: Path, tmp_path: Path
) -> None:
    scale = LossScale(UNIT)

    errors, _ = replay(kind(), golden, tmp_path / "replay", scale)

    assert scale.steps == [expected]
    assert wrong(errors) == set()


def test_scale_that_clipping_reads_is_in_the_norm_and_in_the_moments(
    golden: Path, tmp_path: Path
) -> None:
    scale = LossScale(UNIT)

    errors, _ = replay(ClippedFirst(), golden, tmp_path / "replay", scale)

    assert scale.steps[0].norm == pytest.approx(SCALE)
    assert errors["stage-clip", "", "norm"] == pytest.approx(SCALE - 1)
    assert errors["stage-optimizer", "lm_head", "exp_avg.weight"] == pytest.approx(1 - 1 / SCALE)


def test_without_recognition_a_scale_is_an_error_of_the_loss(golden: Path, tmp_path: Path) -> None:
    errors, steps = replay(UnscaledInClip(), golden, tmp_path / "replay")

    assert errors["gradients", "", "output.logits"] == pytest.approx(SCALE - 1)
    assert [found.factor for found in steps.modules.scales] == pytest.approx([SCALE, SCALE])


class OneRank(PartialSums):
    """Sums over a group of this process alone."""

    def __init__(self) -> None:
        super().__init__(cast("Any", SimpleNamespace(size=lambda: 1, rank=lambda: 0)))

    def total(self, value: Tensor) -> Tensor:
        return value.detach().double()


def test_shares_of_a_skipped_step_are_forgotten(golden: Path, tmp_path: Path) -> None:
    scope = RankScope(partial=OneRank())

    _, steps = replay(SkipsOnce(), golden, tmp_path / "replay", LossScale(UNIT), scope)

    shares = steps.of_gradients.rank_shares
    assert [(one.step, one.source) for one in shares] == [(0, 0)]


class ClipsEachMicroBatch(Plain):
    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        super().clip_gradients(self.plan.max_grad_norm)


def test_norms_show_what_was_clipped_before_all_was_added_up(golden: Path, tmp_path: Path) -> None:
    _, plain = replay(Plain(), golden, tmp_path / "plain")
    _, clipped = replay(ClipsEachMicroBatch(), golden, tmp_path / "clipped")
    norms = plain.of_gradients.norms
    after_clipping = clipped.of_gradients.norms

    assert [norm.phase for norm in after_clipping] == ["backward", "reduce", "clip"]
    assert after_clipping[0].first == pytest.approx(0.1, rel=1e-3)
    assert after_clipping[0].found == pytest.approx(0.1, rel=1e-3)
    assert min(norms[0].first, norms[0].found) > 0.2
    # What is injected is the reference's, whatever was found.
    assert after_clipping[0].injected == pytest.approx(norms[0].injected)
    assert after_clipping[2].found == pytest.approx(0.1, rel=1e-3)
