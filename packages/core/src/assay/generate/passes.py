"""Passes over a model, which both sides of a check make: free, forced, replayed, repeated.

The reference records a generated text in one call, where that gives the values of the steps. A yardstick that
reads a whole text computes the values of the prefill and of all decode steps, in about the time of the prefill.
A trial on small texts decides whether a model allows this: its own steps must replay exactly. A whole
text leaves only the last recurrent state and the last inputs of a convolution, not those of earlier steps. The trial
of a model with such states therefore fails, and every step is recorded.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from assay.devices.base import Device
from assay.generate.generation_loop import (
    Generated,
    OutputError,
    count_tokens,
    generate,
    generate_forced,
    generation_options,
    model_code,
    read_text,
    timeline_of,
    whole_text,
)
from assay.generate.golden import LOGITS, batch_attachment
from assay.hooks.coverage_watch import UsageWatch
from assay.hooks.expert_choices import ChoiceTracer
from assay.hooks.module_tracer import ActiveCall, ModuleTracer, NullHandler
from assay.hooks.suspension import exact_for
from assay.hooks.tensors import Boundary, constants, iterate_tensors
from assay.inputs import Batch
from assay.judge.results import ReplayResults
from assay.media import model_inputs
from assay.models import LoadedModel
from assay.models.config_files import attention_of, first_line
from assay.progress import Progress
from assay.recording.modules import PointwiseModules, Recorder
from assay.replay.modules import DriftMeter, Replayer
from assay.replay.ports import BatchSource, RankLayout
from assay.replay.routing import (
    ChoiceRecorder,
    Key,
    NearTieChoices,
    NoiseOfChoices,
    RecordedChoice,
    ScoreNoise,
    read_choices,
)
from assay.replay.trace_views import WHOLE_TEXTS, ReplayedTrace, StepwiseTrace
from assay.statistics import worst_error
from assay.trace import Trace, TraceWriter, require_fields
from assay.watchdog import temporary_folder

# Tokens of a text that are generated twice: by the prefill and seven steps.
_REPEATED_TOKENS = 8


Choosing = Callable[[nn.Module, "Work"], AbstractContextManager[None]]
"""Makes a context that observes or replaces expert choices in one free run of a model."""


@dataclass(frozen=True, slots=True)
class Side:
    """A model on a device, ready to run."""

    loaded: LoadedModel
    device: Device
    choices: Choosing | None = None
    """For runs on the model's own values, not for recording or replay; None without experts."""
    layout: RankLayout | None = None
    """The shards of this rank's tensors; None if they are whole."""
    compiled: bool = False
    """True if torch.compile runs the model."""

    def choosing(self, work: "Work") -> AbstractContextManager[None]:
        """Return the context that handles the choices of one run of `work`."""
        return self.choices(self.loaded.model, work) if self.choices else nullcontext()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run model code as the device does; a float64 model in true double precision."""
        with self.device.execution(), exact_for(self.loaded.dtype):
            yield


@dataclass(frozen=True, slots=True)
class Work:
    """A batch to run, and the location of its rows in the reference's batches."""

    batch: Batch
    source: BatchSource
    text_step: int | None = None
    """Step number under which one call over the prompt and all new tokens is recorded. None: one call for
    each token, as a free run needs it."""

    def begin(self, tracer: ModuleTracer, tokens_BN: Tensor | None = None) -> None:
        """Tell `tracer` that the batch begins. tokens_BN: the forced tokens of a whole text."""
        batch, step = self.batch, 0
        if self.text_step is not None and tokens_BN is not None:
            batch, step = whole_text(batch, tokens_BN), self.text_step
        tracer.begin_batch(batch.number, timeline_of(batch), first_step=step)


def whole_batches(batches: Sequence[Batch]) -> list[Work]:
    """Return the reference's batches unchanged."""
    return [Work(batch, BatchSource(batch.number)) for batch in batches]


def single_rows(batches: Sequence[Batch]) -> list[Work]:
    """Cut the reference's batches into single rows.

    Rows keep the padding of their batch, so that every tensor has a partner of the same shape. Batches of texts with
    images stay whole: the values of a tower have no rows.
    """
    whole = [batch for batch in batches if batch.holds_media]
    return [
        Work(batch, BatchSource(batch.number))
        if batch in whole
        else Work(
            replace(batch.select_row(row), padded_to=batch.length), BatchSource(batch.number, row)
        )
        for batch in batches
        for row in range(1 if batch in whole else len(batch.prompts))
    ]


def run_free(side: Side, work: Work, sampling: dict[str, Any]) -> Generated:
    """Generate freely. Returns: the chosen tokens, and the logits for each."""
    with side.running(), side.choosing(work):
        return generate(side.loaded, work.batch, sampling)


def run_all_free(
    side: Side, works: Sequence[Work], sampling: dict[str, Any], watch: UsageWatch | None
) -> Iterator[Generated]:
    """Call `run_free` for all work, while `watch` observes which parts of the model run."""
    with nullcontext() if watch is None else watched(side, watch) as tracer:
        for work in works:
            if tracer is not None:
                work.begin(tracer)
            yield run_free(side, work, sampling)


def run_forced(
    side: Side, work: Work, tokens_BN: Tensor, inside: AbstractContextManager[Any] | None = None
) -> Generated:
    """Compute the model's outputs for given tokens.

    inside: entered last, as the innermost of two dispatch modes sees operations first.
    """
    with side.running(), side.choosing(work), inside or nullcontext():
        if work.text_step is not None:
            return Generated(tokens_BN, {LOGITS: read_text(side.loaded, work.batch, tokens_BN)})
        return generate_forced(side.loaded, work.batch, tokens_BN)


@contextmanager
def watched(side: Side, watch: UsageWatch) -> Iterator[ModuleTracer]:
    """Let `watch` observe inside the context which parts of its model a side uses."""
    model, tracer = side.loaded.model, ModuleTracer(watch)
    watch.add_parameters_of(model)
    # A mode around a compiled graph would make torch compile a different graph.
    reading = nullcontext() if side.compiled or watch.root_only else watch.reading()
    with tracer.attached(model, {""} if watch.root_only else None), reading:
        yield tracer


def record(
    side: Side, works: Sequence[Work], tokens: Sequence[Tensor], watch: UsageWatch, order: int = 0
) -> None:
    """Let `watch` record every call of a teacher-forced run; `tokens` has (B, N) for each work.

    order: number of the first call in the trace.
    """
    side = replace(side, choices=None)
    with watched(side, watch) as tracer:
        tracer.order = order
        for work, tokens_BN in zip(works, tokens, strict=True):
            work.begin(tracer, tokens_BN)
            # `generate` reads images before it calls the model.
            between = watch.reading_between_calls() if work.batch.holds_media else nullcontext()
            with between:
                run_forced(side, work, tokens_BN)


def accumulated_errors(side: Side, batch: Batch, trace: ReplayedTrace) -> dict[str, float]:
    """Return the relative error of every module's result when the longest prompt of `batch` is read.

    No value is replaced, so that errors accumulate along the depth.
    """
    work = max(single_rows([batch]), key=lambda one: len(one.batch.rows[0]))
    meter = DriftMeter(trace, work.source)
    tracer = ModuleTracer(meter)
    with tracer.attached(side.loaded.model), side.running(), side.choosing(work):
        work.begin(tracer)
        generate(side.loaded, first_call(work.batch))
    return meter.relative_errors()


def find_pointwise(side: Side, work: Work) -> frozenset[str]:
    """Find modules whose own code, in the first forward call, only rounds element by element."""
    tracer = ModuleTracer(NullHandler())
    pointwise = PointwiseModules(tracer)
    # Entered last, as the innermost of two dispatch modes sees operations first.
    with tracer.attached(side.loaded.model), side.running(), pointwise:
        generate(side.loaded, first_call(work.batch))
    return pointwise.paths


def first_call(batch: Batch) -> Batch:
    """Return the batch with at most one new token."""
    return replace(batch, max_new_tokens=min(1, batch.max_new_tokens))


def replay(
    side: Side,
    works: Sequence[Work],
    tokens: Sequence[Tensor],
    replayer: Replayer,
    watch: UsageWatch | None = None,
    *,
    tolerated: tuple[type[BaseException], ...] = (),
) -> ReplayResults:
    """Measure every stage of a model against a recorded run, with the recorded values injected.

    watch: a watch around `replayer`, to observe the usage of the model.
    tolerated: errors that end a run and not the replay; what was called before them is measured.
    """
    side = replace(side, choices=None)
    replayer.layout = side.layout
    with watched(side, watch or UsageWatch(replayer)) as tracer:
        for work, tokens_BN in zip(works, tokens, strict=True):
            replayer.source = work.source
            work.begin(tracer, tokens_BN)
            with suppress(*tolerated):
                run_forced(side, work, tokens_BN)
    steps = {work.batch.number: work.text_step for work in works}
    return replayer.finish(lambda site: steps.get(site.micro_batch) in (None, site.step))


@dataclass(frozen=True, slots=True)
class Repeatability:
    """The difference of two runs of the same work."""

    identical: bool
    """True if bitwise equal."""
    spread: float
    """Norm of the difference over the norm of the first run."""


class RepeatedWork:
    """The first work of a side, run twice to see whether its results repeat.

    A work that generates step by step runs again for its first tokens only, whose logits are kept.
    num_tokens: tokens that the second run reads.
    """

    def __init__(self, works: Sequence[Work]) -> None:
        first = works[0]
        if first.text_step is None:
            num_new = min(first.batch.max_new_tokens, _REPEATED_TOKENS)
            first = replace(first, batch=replace(first.batch, max_new_tokens=num_new))
        self._work = first
        self._outputs: Mapping[str, Tensor] = {}
        self.num_tokens = count_tokens([first.batch])

    def offer(self, number: int, outputs: Mapping[str, Tensor]) -> None:
        """Keep the outputs of work `number` if it runs twice."""
        if number == 0:
            num_new = self._work.batch.max_new_tokens
            self._outputs = {
                name: output[:, :num_new].clone() if num_new else output
                for name, output in outputs.items()
            }

    def run_again(self, side: Side, tokens: Sequence[Tensor]) -> Repeatability:
        """Run again, with the tokens of every work, and compare."""
        forced = tokens[0][:, : self._work.batch.max_new_tokens]
        again = run_forced(side, self._work, forced).outputs
        if again.keys() != self._outputs.keys():
            return Repeatability(identical=False, spread=math.inf)
        spreads = [_spread(again[name], first) for name, first in self._outputs.items()]
        identical = all(torch.equal(again[name], first) for name, first in self._outputs.items())
        return Repeatability(identical, worst_error(spreads))


def _spread(again: Tensor, first: Tensor) -> float:
    """Return the norm of the difference over the norm of `first`; infinity for another shape."""
    if again.shape != first.shape:
        return math.inf
    expected = first.double()
    difference = float((again.double() - expected).pow(2).sum())
    return math.sqrt(difference / max(float(expected.pow(2).sum()), 1e-300))


@torch.no_grad()
def processed_scores(
    side: Side, work: Work, tokens_BN: Tensor, logits_BNV: Tensor, sampling: dict[str, Any]
) -> Tensor:
    """Compute the scores after all processors, (B, N, V) float32, for given tokens and logits.

    `generate` prepares the processors: temperature, top-k, top-p, penalties, minimum length.
    Raises: OutputError if the model's generate raises, or does not call `custom_generate`.
    """
    model: Any = side.loaded.model
    scores_BNV = torch.empty(logits_BNV.shape, dtype=torch.float32)
    parameter = next(model.parameters())
    device, is_called = parameter.device, False

    def instead_of_sampling(
        model: Any,  # noqa: ANN401 - as transformers calls it
        input_ids: Tensor,
        logits_processor: Any,  # noqa: ANN401
        **rest: Any,  # noqa: ANN401
    ) -> Tensor:
        nonlocal is_called
        del model, rest
        is_called = True
        sequence = torch.cat([input_ids, tokens_BN.to(input_ids.device)], dim=1)
        start = input_ids.shape[1]
        for step in range(tokens_BN.shape[1]):
            logits = logits_BNV[:, step].to(device, torch.float32)
            scores_BNV[:, step] = logits_processor(sequence[:, : start + step], logits).cpu()
        return sequence

    batch = work.batch
    with side.device.execution(), model_code():
        model.generate(
            **model_inputs(batch, parameter),
            generation_config=generation_options(side.loaded, batch, sampling),
            custom_generate=instead_of_sampling,
        )
    if not is_called:
        raise OutputError("generate does not call its argument custom_generate", raised=True)
    return scores_BNV


_CHOICES = "choices"
_CHOICE_NOISE = "choice-noise"


def record_choices(writer: TraceWriter) -> Choosing:
    """Record the choices of each run into a trace."""

    @contextmanager
    def recording(model: nn.Module, work: Work) -> Iterator[None]:
        recorder = ChoiceRecorder()
        with ChoiceTracer(recorder.choose).attached(model):
            yield
        tensors = recorder.to_tensors()
        if tensors:
            writer.attach(batch_attachment(_CHOICES, work.batch.number), tensors)

    return recording


@dataclass(frozen=True, slots=True)
class RecordedChoices:
    """The choices in a trace, by batch number; empty for a model without experts."""

    by_batch: Mapping[int, Mapping[Key, RecordedChoice]]
    num_rows: Mapping[int, int]

    @classmethod
    def read(cls, trace: Trace, batches: Sequence[Batch]) -> "RecordedChoices":
        """Read the choices of `batches`; none for a model without experts."""
        names = {batch.number: batch_attachment(_CHOICES, batch.number) for batch in batches}
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
        """Return the module paths of the groups of experts and the indexers."""
        return frozenset(key[2] for choices in self.by_batch.values() for key in choices)

    def of_work(self, work: Work) -> dict[Key, RecordedChoice]:
        """Return the choices for `work`."""
        number, row = work.source.batch, work.source.row
        return {
            key: choice.select_row(row, self.num_rows[number])
            for key, choice in self.by_batch.get(number, {}).items()
        }


def replace_choices(
    recorded: RecordedChoices, handler: NoiseOfChoices | NearTieChoices
) -> Choosing:
    """Replace the choices of each run by recorded ones, where `handler` decides so."""
    keeps_selections = isinstance(handler, NoiseOfChoices)

    @contextmanager
    def replacing(model: nn.Module, work: Work) -> Iterator[None]:
        handler.expected = recorded.of_work(work)
        with ChoiceTracer(handler.choose, recorded.modules, keeps_selections).attached(model):
            yield

    return replacing


def attach_choice_noise(writer: TraceWriter, noise: Mapping[str, ScoreNoise]) -> None:
    """Store the noise of router scores, by group of experts, if there is any."""
    if noise:
        writer.attach_json(_CHOICE_NOISE, {module: asdict(item) for module, item in noise.items()})


def read_choice_noise(trace: Trace) -> dict[str, ScoreNoise]:
    """Return the noise that `attach_choice_noise` stored; empty in a golden without it."""
    if _CHOICE_NOISE not in trace.attachments:
        return {}
    stored: Any = trace.attachment_json(_CHOICE_NOISE)
    names = [item.name for item in fields(ScoreNoise)]
    for module, record in stored.items():
        require_fields(trace.folder, module, record, names)
    return {module: ScoreNoise(**item) for module, item in stored.items()}


# Tables of positions that depend on the length of the text so far.
_ROPES_BY_LENGTH = frozenset({"dynamic", "longrope"})

# The type of recurrent layers in transformers' configurations.
_RECURRENT = "linear_attention"

# The trial texts: token counts of prompts, which pad each other, and the number of new tokens.
_TRIAL_PROMPTS = (9, 5)
_TRIAL_NEW_TOKENS = 3

# By dtype of the yardstick, the largest relative error of a step that replays exactly. Sums in another order make
# float64 values differ by 1e-15, and another computation by 1e-8 or more. A yardstick in float32 is for
# candidates in a narrow dtype, whose roundings are a hundred times as large.
_EXACT = {"float64": 1e-12, "float32": 1e-5}

# By dtype of the yardstick, the largest relative error of logits between decode steps and one call over the same
# text. Parts of some float64 models compute in float32, whose unit roundoff is 6e-8. They reach 3e-6.
_LARGEST_CONTRADICTION = {"float64": 3e-5, "float32": 1e-3}
_SMALLEST = torch.finfo(torch.float32).tiny  # stands for the size of logits that are all zero

# The trial rounds nothing: with rounded inputs, steps read keys from the cache that were rounded when they
# were written, and a whole text reads them as they were computed.
_UNROUNDED = Boundary(torch.float64, torch.float64)


class RootInputs(NullHandler):
    """A handler that records the inputs of the root calls of those `works` that have whole texts.

    num_calls: number of recorded calls.
    """

    def __init__(self, writer: TraceWriter, works: Sequence[Work]) -> None:
        self._writer = writer
        self._batches = {work.batch.number for work in works if work.text_step is not None}
        self.num_calls = 0

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see TraceHandler
        """Record the inputs of a root call."""
        if active.call.caller is None and active.call.site.micro_batch in self._batches:
            tensors = dict(iterate_tensors(active.arguments, "input"))
            known = constants(active.arguments, "input")
            call = replace(active.call, order=self.num_calls, constants=known, ports=tuple(tensors))
            self._writer.add(call, tensors)
            self.num_calls += 1
        return output


def with_whole_texts(side: Side, works: Sequence[Work], progress: Progress) -> list[Work]:
    """Return `works`, each with a step for its whole text if one call gives the values of all steps.

    progress: gets a note if the trial raises.
    """
    batches = [work.batch for work in works]
    steps = steps_of_texts(side.loaded, batches)
    first = next((batch for batch in batches if batch.number in steps), None)
    if first is None or not _has_exact_texts(side, first, progress):
        return list(works)
    return [replace(work, text_step=steps.get(work.batch.number)) for work in works]


def find_contradictions(side: Side, work: Work, tokens_BN: Tensor, logits_BNV: Tensor) -> list[str]:
    """Compare the logits of steps with those of one call over the text, and of a padded text with those of it alone.

    Returns: a note for each pair that disagrees, or if the model raises; none for a model whose logits depend on the
        length: by its positions, or because it chooses keys by their scores, equal ones in any order.
    """
    loaded, batch = side.loaded, work.batch
    config: Any = loaded.config
    num_keys = getattr(config.get_text_config(decoder=True), "index_topk", None)
    chooses_keys = num_keys is not None and num_keys < batch.length + batch.max_new_tokens
    if loaded.decoder_start or chooses_keys or _rope_depends_on_length(loaded):
        return []
    how = "decode steps" if batch.prefill_chunk is None else "a prefill in chunks"
    batch = replace(batch, prefill_chunk=None)
    shortest = min(range(len(batch.rows)), key=lambda row: len(batch.rows[row]))
    alone, own = batch.select_row(shortest), slice(shortest, shortest + 1)
    try:
        with side.running():
            text_BNV = read_text(loaded, batch, tokens_BN)
            is_padded = alone.length < batch.length
            alone_BNV = read_text(loaded, alone, tokens_BN[own]) if is_padded else text_BNV[own]
    except OutputError as error:
        return [f"{how}: not compared with one call over the same text: {first_line(error)}"]
    limit = _LARGEST_CONTRADICTION[loaded.dtype]
    by_step = _first_difference(logits_BNV.float(), text_BNV, batch.prompts, limit)
    by_padding = _first_difference(text_BNV[own], alone_BNV, alone.prompts, limit)
    found = []
    if by_step:
        found.append(
            f"{how} and one call over the same text compute other logits ({by_step}): it loses a part of its cache, or"
            " reads later tokens"
        )
    if by_padding:
        found.append(
            f"the logits of a text change if its batch pads it ({by_padding}): it reads padding, or counts positions"
            " from it"
        )
    return [
        f"the model's code contradicts itself: {one}. Both sides share this code" for one in found
    ]


def _first_difference(
    actual_BNV: Tensor, expected_BNV: Tensor, prompts: Sequence[int], limit: float
) -> str:
    """Return the largest error of the logits and the place of the first one over `limit`; "" if none is over it."""
    # Infinite logits of excluded tokens are equal; NaN on one side is an error.
    same = (actual_BNV == expected_BNV) | (actual_BNV.isnan() & expected_BNV.isnan())
    size_BN = expected_BNV.where(expected_BNV.isfinite(), 0.0).norm(dim=-1).clamp(min=_SMALLEST)
    errors_BN = (actual_BNV - expected_BNV).where(~same, 0.0).norm(dim=-1) / size_BN
    wrong = (~errors_BN.le(limit)).T.nonzero()
    if not len(wrong):
        return ""
    step, row = wrong[0].tolist()
    largest = float(errors_BN.max())
    return f"relative error up to {largest:.2g}, first at prompt {prompts[row]}, new token {step}"


def attach_text_steps(writer: TraceWriter, works: Sequence[Work]) -> None:
    """Store the step numbers of whole texts, for `StepwiseTrace.open`."""
    steps = {str(work.batch.number): work.text_step for work in works if work.text_step is not None}
    writer.attach_json(WHOLE_TEXTS, steps)


def steps_of_texts(loaded: LoadedModel, batches: Iterable[Batch]) -> dict[int, int]:
    """Return, by batch, the step number under which its text is recorded: one past the last step.

    Batches that cannot be read in one call are left out.
    """
    steps = {batch.number: _step_of_text(loaded, batch) for batch in batches}
    return {number: step for number, step in steps.items() if step is not None}


def _step_of_text(loaded: LoadedModel, batch: Batch) -> int | None:
    """Return the step number of the text of `batch`; None if it cannot be read in one call."""
    config: Any = loaded.config
    config = config.get_text_config(decoder=True)
    length = batch.length + batch.max_new_tokens
    windows = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    # Code for one step of a recurrence rounds differently from that for a text, as in Mamba2's norms.
    is_recurrent = getattr(loaded.model, "_is_stateful", False) or _RECURRENT in (
        getattr(config, "layer_types", None) or ()
    )
    can_read = (
        loaded.can_generate
        and not loaded.decoder_start
        and not is_recurrent
        and batch.prefill_chunk is None
        and not batch.media  # the values of an image have no columns that could be cut to steps
        and batch.max_new_tokens > 1
        and not any(window is not None and window < length for window in windows)
        and not _rope_depends_on_length(loaded)
    )
    return batch.max_new_tokens if can_read else None


def _rope_depends_on_length(loaded: LoadedModel) -> bool:
    config: Any = loaded.config
    ropes = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = {one.get("rope_type") for one in (ropes, *ropes.values()) if isinstance(one, dict)}
    return bool(kinds & _ROPES_BY_LENGTH)


def _has_exact_texts(side: Side, batch: Batch, progress: Progress) -> bool:
    """Return True if the steps of a small text replay exactly on the record of the whole text."""
    row = max(batch.rows, key=len)
    rows = tuple((row * _TRIAL_PROMPTS[0])[:length] for length in _TRIAL_PROMPTS)
    numbers = tuple(range(len(rows)))
    trial = replace(
        batch, number=0, rows=rows, prompts=numbers, max_new_tokens=_TRIAL_NEW_TOKENS, padded_to=0
    )
    work = Work(trial, BatchSource(0), text_step=_TRIAL_NEW_TOKENS)
    side = replace(side, choices=None)
    with temporary_folder("assay-trial-") as folder:
        try:
            results = _replay_own_steps(side, work, Path(folder) / "trace")
        except Exception as error:  # noqa: BLE001 - model code raises anything
            progress.note(f"each step is recorded; reading a text in one call: {first_line(error)}")
            return False
    return _is_exact(results, _EXACT[side.loaded.dtype])


def _replay_own_steps(side: Side, work: Work, folder: Path) -> ReplayResults:
    step_by_step = replace(work, text_step=None)
    with TraceWriter(folder, {}) as writer:
        inputs = RootInputs(writer, [work])
        watch = UsageWatch(inputs, root_only=True)
        (free,) = run_all_free(side, [step_by_step], {}, watch)
        tokens = [free.tokens]
        watch = UsageWatch(Recorder(writer, _UNROUNDED))
        record(side, [work], tokens, watch, inputs.num_calls)
        attach_text_steps(writer, [work])
    trace = StepwiseTrace.open(Trace.open(folder))
    replayer = Replayer(trace, _UNROUNDED, attention_of(side.loaded))
    return replay(side, [step_by_step], tokens, replayer)


def _is_exact(results: ReplayResults, largest_error: float) -> bool:
    is_complete = not (results.unmatched_expected or results.uncalled_modules)
    return (
        bool(results.ports)
        and is_complete
        and all(
            port.exact.num_different == 0 and port.sums.relative_error <= largest_error
            for port in results.ports.values()
        )
    )
