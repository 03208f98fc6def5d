"""Recording a generated text in one call, where that gives the values of the steps.

A yardstick that reads a whole text in one call computes the values of the prefill and of all decode steps, in
about the time of the prefill. A trial on small texts decides whether a model allows this: its own steps must
replay exactly.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from assay.comparing.results import ReplayResults
from assay.generate.passes import Side, Work, record, replay, run_all_free
from assay.hooks.module_tracer import ActiveCall, NullHandler
from assay.hooks.tensors import Boundary, constants, iterate_tensors
from assay.hooks.usage import UsageWatch
from assay.inputs import Batch
from assay.locating.modules import Replayer
from assay.locating.ports import BatchSource
from assay.locating.trace_views import WHOLE_TEXTS, StepwiseTrace
from assay.models import LoadedModel
from assay.models.config_files import attention_of
from assay.recording.modules import Recorder
from assay.trace import Trace, TraceWriter
from assay.watchdog import temporary_folder

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


def with_whole_texts(side: Side, works: Sequence[Work]) -> list[Work]:
    """Return `works`, each with a step for its whole text if one call gives the values of all steps."""
    steps = steps_of_texts(side.loaded, [work.batch for work in works])
    if not steps or not _has_exact_texts(side, works[0].batch):
        return list(works)
    return [replace(work, text_step=steps.get(work.batch.number)) for work in works]


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
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = {one.get("rope_type") for one in (ropes, *ropes.values()) if isinstance(one, dict)}
    # Code for one step of a recurrence rounds otherwise than that for a text, as in Mamba2's norms.
    is_recurrent = getattr(loaded.model, "_is_stateful", False) or _RECURRENT in (
        getattr(config, "layer_types", None) or ()
    )
    can_read = (
        loaded.can_generate
        and not is_recurrent
        and batch.prefill_chunk is None
        and batch.max_new_tokens > 1
        and not any(window is not None and window < length for window in windows)
        and not kinds & _ROPES_BY_LENGTH
    )
    return batch.max_new_tokens if can_read else None


def _has_exact_texts(side: Side, batch: Batch) -> bool:
    """Return True if the steps of a small text replay exactly on the record of the whole text."""
    row = max(batch.rows, key=len)
    rows = tuple((row * _TRIAL_PROMPTS[0])[:length] for length in _TRIAL_PROMPTS)
    numbers = tuple(range(len(rows)))
    trial = Batch(0, rows, numbers, batch.pad_token_id, _TRIAL_NEW_TOKENS)
    work = Work(trial, BatchSource(0), text_step=_TRIAL_NEW_TOKENS)
    side = replace(side, choices=None)
    with temporary_folder("assay-trial-") as folder:
        try:
            results = _replay_own_steps(side, work, Path(folder) / "trace")
        except Exception:  # noqa: BLE001 - model code raises anything
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
