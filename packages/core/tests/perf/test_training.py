"""The cost of checking a few training steps compared with the steps themselves."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from assay.hooks.module_tracer import ModuleTracer, NullHandler
from assay.hooks.tensors import Boundary
from assay.models.load import limited_threads
from assay.runs import SilentProgress
from assay.trace import Trace, TraceWriter
from assay.training.batches import plan_batches
from assay.training.check import load_training_limits
from assay.training.judging.evidence import TrainEvidence
from assay.training.judging.verdict import judge_training
from assay.training.processes.candidate import run_candidate
from assay.training.processes.reference import Yardstick, record_reference
from assay.training.protocol import MicroBatch, StepReport
from assay.training.replay.determinism import comparable
from assay.training.replay.step_observer import StepObserver
from assay.training.replay.step_values import (
    TRACE,
    RunRows,
    StageRecorder,
    StageReplayer,
    StepValueHandler,
)
from assay.training.reports import TrainCheck, TrainOptions
from assay.training.state.files import NOISE
from assay.training.trainers.reference import ReferenceTrainer
from assay.training.trainers.registry import OpenedTrainer
from packages.core.tests.perf.conftest import Table
from packages.core.tests.perf.stopwatch import Times, median_ratio, take_turns

ROUNDS = 2
DTYPE = "float32"
# About 3,500 tokens a step: what is measured between phases costs by parameter, not by token, as
# much here as the training of some 700 tokens.
MICRO_BATCHES = 32


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> TrainOptions:
    """Of a random Llama, 4 layers, 1.3 M parameters."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=2_000,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return TrainOptions(model=str(folder), micro_batches=MICRO_BATCHES)


class _NoHooks(ModuleTracer):
    """Watches no module: what lies between the phases is seen by the trainer's methods."""

    @contextmanager
    def attached(self, model: nn.Module, modules: Collection[str] | None = None) -> Iterator[None]:
        """Attach no hook."""
        del model, modules
        yield


@dataclass
class Sides:
    """Yardstick and candidate, set up, and the batches of all steps."""

    yardstick: Yardstick
    candidate: ReferenceTrainer
    batches: Sequence[Sequence[MicroBatch]]

    @classmethod
    def of(cls, options: TrainOptions) -> "Sides":
        yardstick, candidate = Yardstick(DTYPE), ReferenceTrainer()
        yardstick.setup(options.plan("cpu/float64"))
        candidate.setup(options.plan(f"cpu/{DTYPE}"))
        return cls(yardstick, candidate, plan_batches(options))

    def train(self) -> None:
        """The plain steps of both."""
        for trainer, dtype in ((self.yardstick, "float64"), (self.candidate, DTYPE)):
            with comparable(dtype, trainer.device):
                for batch in self.batches:
                    trainer.step(batch)

    def train_observed(self, folder: Path) -> StageReplayer:
        """The same steps; what lies between their phases is recorded, then measured."""
        boundary = Boundary.exact_inputs_for(getattr(torch, DTYPE))
        with TraceWriter(folder / TRACE, {}) as writer:
            self._observe(self.yardstick, "float64", StageRecorder(writer, boundary))
        rows = RunRows.of_batches(self.batches)
        replayer = StageReplayer(folder, boundary, rows)
        self._observe(self.candidate, DTYPE, replayer)
        for results in replayer.results.values():
            results.flush()
        return replayer

    def _observe(self, trainer: ReferenceTrainer, dtype: str, handler: StepValueHandler) -> None:
        rows = RunRows.of_batches(self.batches)
        opened = OpenedTrainer.of(trainer, "reference")
        no_boundaries: Any = NullHandler()
        observer = StepObserver(opened, handler, no_boundaries, rows)
        observer.tracer = _NoHooks(no_boundaries)
        observer.taps = cast("Any", SimpleNamespace(join=lambda loss: loss, finish_backward=bool))
        with observer.attached(), comparable(dtype, trainer.device):
            for number, batch in enumerate(self.batches):
                observer.run_step(number, batch)


def test_values_between_phases_cost_a_quarter_of_the_steps(
    options: TrainOptions, new_folder: Callable[[], Path], table: Table
) -> None:
    sides = Sides.of(options)

    def observe() -> None:
        replayer = sides.train_observed(new_folder())
        assert len(replayer.results["optimizer"].ports) > 3 * 36

    times = take_turns({"observed": observe, "plain": sides.train}, ROUNDS)

    table.at_most(
        "values of training steps", median_ratio(times["observed"], times["plain"]), 1.25,
        "losses, gradients after each phase, updates and moments, of reference and candidate",
    )  # fmt: skip


def test_whole_check_makes_at_most_four_more_runs_than_two(
    options: TrainOptions, new_folder: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_steps = 0
    step = ReferenceTrainer.step

    def counting(trainer: ReferenceTrainer, batch: Sequence[MicroBatch]) -> StepReport:
        nonlocal num_steps
        num_steps += 1
        return step(trainer, batch)

    monkeypatch.setattr(ReferenceTrainer, "step", counting)
    few = options.model_copy(update={"micro_batches": 2})

    whole_check(few, new_folder())

    # Of the noise run two, and free ones of the candidate, which is resumed once.
    assert 2 < num_steps / few.steps <= 2 + 4


@pytest.fixture(scope="module")
def cost_of_whole_check(options: TrainOptions, tmp_path_factory: pytest.TempPathFactory) -> Times:
    """How many times as long as the plain steps of reference and candidate it takes."""
    sides = Sides.of(options)

    def check() -> None:
        whole_check(options, tmp_path_factory.mktemp("check") / "run")

    with limited_threads(1):
        times = take_turns({"check": check, "plain": sides.train}, ROUNDS)
    return median_ratio(times["check"], times["plain"])


def test_whole_check_costs_few_more_runs(cost_of_whole_check: Times, table: Table) -> None:
    note = "of the plain steps of reference and candidate"
    table.at_most("whole check of training", cost_of_whole_check, 8, note)


def whole_check(options: TrainOptions, folder: Path) -> None:
    """All that the processes of `assay check train` do, and the judge."""
    golden, actual = folder / "golden", folder / "candidate"
    golden.mkdir(parents=True)
    check = TrainCheck(options, "cpu/float32", f"cpu/{DTYPE}", golden=golden, folder=golden)
    reference = record_reference(check, SilentProgress())
    report = run_candidate(replace(check, folder=actual), SilentProgress())
    evidence = TrainEvidence(
        options,
        DTYPE,
        reference,
        [report],
        load_training_limits("training"),
        noise=Trace.open(golden / NOISE),
        candidates=[Trace.open(actual)],
    )
    assert Trace.open(golden / TRACE).complete
    assert judge_training(evidence)[0].verdict == "PASS"
