"""The passes over a model that both sides of a check make: free, forced, replayed."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from assay.comparing.results import ReplayResults
from assay.devices.base import Device
from assay.generate.driving import Generated, generate, generate_forced, timeline_of
from assay.inputs import Batch
from assay.locating.replay import BatchSource, Replayer
from assay.models import LoadedModel
from assay.recording.capture import Recorder
from assay.recording.hooks import Watch
from assay.recording.precision import ExactDouble
from assay.recording.rounding import Border
from assay.trace import Trace, TraceWriter


@dataclass(frozen=True, slots=True)
class Side:
    """A model on a device, ready to run."""

    loaded: LoadedModel
    device: Device

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


def plan_work(batches: Sequence[Batch], batch_size: int | None) -> list[Work]:
    """The reference's batches as they are, or cut into single rows.

    Rows keep the padding of their batch: every tensor then has a partner of the same shape.
    """
    if batch_size is None:
        return [Work(batch, BatchSource(batch.number)) for batch in batches]
    return [
        Work(
            replace(
                batch,
                input_ids=batch.input_ids[row : row + 1],
                attention_mask=batch.attention_mask[row : row + 1],
                prompts=batch.prompts[row : row + 1],
            ),
            BatchSource(batch.number, row),
        )
        for batch in batches
        for row in range(len(batch.prompts))
    ]


def run_free(side: Side, work: Work) -> Tensor:
    """The tokens that the model chooses, (B, N)."""
    with side.running():
        return generate(side.loaded, work.batch).tokens


def run_forced(side: Side, work: Work, tokens_BN: Tensor) -> Generated:
    """The logits that the model has for given tokens."""
    with side.running():
        return generate_forced(side.loaded, work.batch, tokens_BN)


def record(
    side: Side, works: Sequence[Work], tokens: Sequence[Tensor], writer: TraceWriter, border: Border
) -> None:
    """Record every call of a teacher-forced run; `tokens` has (B, N) for each work."""
    watch = Watch(Recorder(writer, border))
    with watch.attached(side.loaded.model):
        for work, tokens_BN in zip(works, tokens, strict=True):
            watch.begin_batch(work.batch.number, timeline_of(work.batch))
            run_forced(side, work, tokens_BN)


def replay(
    side: Side, works: Sequence[Work], tokens: Sequence[Tensor], trace: Trace, border: Border
) -> ReplayResults:
    """Measure every stage of a model against a recorded run, fed the recorded values."""
    attention = getattr(side.loaded.model.config, "_attn_implementation", "eager")
    replayer = Replayer(trace, border, attention)
    watch = Watch(replayer)
    with watch.attached(side.loaded.model):
        for work, tokens_BN in zip(works, tokens, strict=True):
            replayer.source = work.source
            watch.begin_batch(work.batch.number, timeline_of(work.batch))
            run_forced(side, work, tokens_BN)
    return replayer.finish()
