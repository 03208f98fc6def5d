"""Expert choices in free runs: recorded from the yardstick, replaced in near ties."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from assay.generate.passes.batch_attachments import batch_attachment
from assay.generate.passes.passes import Work
from assay.hooks.expert_choices import ChoiceTracer
from assay.inputs import Batch
from assay.locating.matching.expert_routing import (
    ChoiceRecorder,
    Key,
    NearTieChoices,
    NoiseOfChoices,
    RecordedChoice,
    ScoreNoise,
    read_choices,
)
from assay.trace import Trace, TraceWriter

_NAME = "choices"
_NOISE = "choice-noise"


class RecordingChoices:
    """Recorder of the choices of each run, into a trace."""

    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer

    @contextmanager
    def attached(self, model: nn.Module, work: Work) -> Iterator[None]:
        """Record one run inside the context."""
        recorder = ChoiceRecorder()
        with ChoiceTracer(recorder).attached(model):
            yield
        tensors = recorder.to_tensors()
        if tensors:
            self._writer.attach(batch_attachment(_NAME, work.batch.number), tensors)


@dataclass(frozen=True, slots=True)
class RecordedChoices:
    """The choices in a trace, by batch number; empty for a model without experts."""

    by_batch: Mapping[int, Mapping[Key, RecordedChoice]]
    num_rows: Mapping[int, int]

    @classmethod
    def read(cls, trace: Trace, batches: Sequence[Batch]) -> "RecordedChoices":
        """Read the choices of `batches`; none for a model without experts."""
        names = {batch.number: batch_attachment(_NAME, batch.number) for batch in batches}
        return cls(
            {
                number: read_choices(dict(trace.attachment(name)))
                for number, name in names.items()
                if name in trace.attachments
            },
            {batch.number: len(batch.prompts) for batch in batches},
        )

    @property
    def modules(self) -> frozenset[str]:
        """Return the module paths of the groups of experts."""
        return frozenset(key[2] for choices in self.by_batch.values() for key in choices)

    def of_work(self, work: Work) -> dict[Key, RecordedChoice]:
        """Return the choices for `work`."""
        number, row = work.source.batch, work.source.row
        return {
            key: choice.select_row(row, self.num_rows[number])
            for key, choice in self.by_batch.get(number, {}).items()
        }


@dataclass(frozen=True, slots=True)
class ReplacedChoices:
    """Replacement of the choices of each run by recorded ones, where `handler` decides so."""

    recorded: RecordedChoices
    handler: NoiseOfChoices | NearTieChoices

    @contextmanager
    def attached(self, model: nn.Module, work: Work) -> Iterator[None]:
        """Replace the choices of one run inside the context."""
        self.handler.expected = self.recorded.of_work(work)
        measures = isinstance(self.handler, NoiseOfChoices)
        tracer = ChoiceTracer(self.handler, None if measures else self.recorded.modules)
        with tracer.attached(model):
            yield


def attach_choice_noise(writer: TraceWriter, noise: Mapping[str, ScoreNoise]) -> None:
    """Store the noise of router scores, by group of experts, if there is any."""
    if noise:
        writer.attach_json(_NOISE, {module: asdict(item) for module, item in noise.items()})


def read_choice_noise(trace: Trace) -> dict[str, ScoreNoise]:
    """Return the noise that `attach_choice_noise` stored; empty in a golden without it."""
    if _NOISE not in trace.attachments:
        return {}
    stored: Any = trace.attachment_json(_NOISE)
    return {module: ScoreNoise(**item) for module, item in stored.items()}
