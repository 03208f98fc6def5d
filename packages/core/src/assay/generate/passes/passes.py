"""The passes over a model that both sides of a check make: free, forced, replayed."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor, nn

from assay.comparing.results import ReplayResults
from assay.devices.base import Device
from assay.generate.passes.generation_loop import Generated, generate, generate_forced, timeline_of
from assay.hooks.module_tracer import ModuleTracer, NullHandler
from assay.hooks.usage import UsageWatch
from assay.hooks.values.boundary import Boundary
from assay.hooks.values.exact_double import ExactDouble
from assay.inputs import Batch
from assay.locating.accumulated_error import DriftMeter
from assay.locating.matching.batch_source import BatchSource
from assay.locating.matching.rank_layout import RankLayout
from assay.locating.modules import Replayer
from assay.models import LoadedModel
from assay.recording.modules import Recorder
from assay.recording.operations import PointwiseModules
from assay.trace import TraceWriter


class ChoicesOfBatch(Protocol):
    """What watches or replaces the choices of experts in the free runs of one side."""

    def attached(self, model: nn.Module, work: "Work") -> AbstractContextManager[None]:
        """Inside, one run of `work` by `model` is watched."""


@dataclass(frozen=True, slots=True)
class Side:
    """A model on a device, ready to run.

    choices: a context for runs on the model's own values, not for recording or replay; None if
        choices of experts need no handling.
    layout: how this rank's tensors are sharded; None if they are whole.
    compiled: True if torch.compile runs the model.
    """

    loaded: LoadedModel
    device: Device
    choices: ChoicesOfBatch | None = None
    layout: RankLayout | None = None
    compiled: bool = False

    def choosing(self, work: "Work") -> AbstractContextManager[None]:
        """The context of one run of `work`."""
        return self.choices.attached(self.loaded.model, work) if self.choices else nullcontext()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run model code as the device does, and in true double precision where that is asked."""
        with ExitStack() as stack:
            stack.enter_context(self.device.execution())
            if self.loaded.dtype == "float64":
                stack.enter_context(ExactDouble())
            yield


@dataclass(frozen=True, slots=True)
class Work:
    """A batch to run and where its rows are found in the reference's batches."""

    batch: Batch
    source: BatchSource


def whole_batches(batches: Sequence[Batch]) -> list[Work]:
    """The reference's batches as they are."""
    return [Work(batch, BatchSource(batch.number)) for batch in batches]


def single_rows(batches: Sequence[Batch]) -> list[Work]:
    """The reference's batches cut into single rows.

    Rows keep the padding of their batch: every tensor then has a partner of the same shape.
    """
    return [
        Work(
            replace(
                batch,
                rows=batch.rows[row : row + 1],
                prompts=batch.prompts[row : row + 1],
                padded_to=batch.length,
            ),
            BatchSource(batch.number, row),
        )
        for batch in batches
        for row in range(len(batch.prompts))
    ]


def run_free(side: Side, work: Work, sampling: dict[str, Any]) -> Generated:
    """The tokens that the model chooses, and the logits that it had for each."""
    with side.running(), side.choosing(work):
        return generate(side.loaded, work.batch, sampling)


def run_all_free(
    side: Side, works: Sequence[Work], sampling: dict[str, Any], watch: UsageWatch | None
) -> Iterator[Generated]:
    """Call `run_free` for all work, while `watch` observes which parts of the model run."""
    with nullcontext() if watch is None else watched(side, watch) as tracer:
        for work in works:
            if tracer is not None:
                tracer.begin_batch(work.batch.number, timeline_of(work.batch))
            yield run_free(side, work, sampling)


def run_forced(
    side: Side, work: Work, tokens_BN: Tensor, inside: AbstractContextManager[Any] | None = None
) -> Generated:
    """The logits that the model has for given tokens.

    inside: entered after the device: of two that watch operations the inner one sees them first.
    """
    with side.running(), side.choosing(work), inside or nullcontext():
        return generate_forced(side.loaded, work.batch, tokens_BN)


@contextmanager
def watched(side: Side, watch: UsageWatch) -> Iterator[ModuleTracer]:
    """Let `watch` observe, inside this context, which parts of its model a side uses."""
    model, tracer = side.loaded.model, ModuleTracer(watch)
    watch.add_parameters_of(model)
    # A mode around a compiled graph would make torch compile a different graph.
    reading = nullcontext() if side.compiled else watch.reading()
    with tracer.attached(model), reading:
        yield tracer


def record(
    side: Side,
    works: Sequence[Work],
    tokens: Sequence[Tensor],
    writer: TraceWriter,
    boundary: Boundary,
) -> UsageWatch:
    """Record every call of a teacher-forced run; `tokens` has (B, N) for each work.

    Returns: the usage of the model.
    """
    side = replace(side, choices=None)
    watch = UsageWatch(Recorder(writer, boundary))
    with watched(side, watch) as tracer:
        for work, tokens_BN in zip(works, tokens, strict=True):
            tracer.begin_batch(work.batch.number, timeline_of(work.batch))
            run_forced(side, work, tokens_BN)
    return watch


def run_all_forced(
    side: Side, works: Sequence[Work], tokens: Sequence[Tensor], meter: DriftMeter | None
) -> Iterator[Generated]:
    """`run_forced` for all work, one after the other as they are asked for.

    meter: measures on the way the error that accumulates.
    """
    if meter is None:
        for work, tokens_BN in zip(works, tokens, strict=True):
            yield run_forced(side, work, tokens_BN)
        return
    tracer = ModuleTracer(meter)
    with tracer.attached(side.loaded.model):
        for work, tokens_BN in zip(works, tokens, strict=True):
            meter.source = work.source
            tracer.begin_batch(work.batch.number, timeline_of(work.batch))
            yield run_forced(side, work, tokens_BN)


def find_pointwise(side: Side, work: Work) -> frozenset[str]:
    """Modules whose own code, in the first forward call, only rounds element by element."""
    batch = replace(work.batch, max_new_tokens=1)
    tracer = ModuleTracer(NullHandler())
    pointwise = PointwiseModules(tracer)
    with tracer.attached(side.loaded.model), pointwise:
        generate(side.loaded, batch)
    return pointwise.paths


def replay(
    side: Side,
    works: Sequence[Work],
    tokens: Sequence[Tensor],
    replayer: Replayer,
    watch: UsageWatch | None = None,
) -> ReplayResults:
    """Measure every stage of a model against a recorded run, with the recorded values injected.

    watch: a watch around `replayer`, if the usage of the model is wanted.
    """
    side = replace(side, choices=None)
    replayer.layout = side.layout
    with watched(side, watch or UsageWatch(replayer)) as tracer:
        for work, tokens_BN in zip(works, tokens, strict=True):
            replayer.source = work.source
            tracer.begin_batch(work.batch.number, timeline_of(work.batch))
            run_forced(side, work, tokens_BN)
    return replayer.finish()
