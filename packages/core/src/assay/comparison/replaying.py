"""Replay of a dump: the trusted model computes every stage from the inputs in the dump.

The tokens of the dump run three times. The yardstick records a trace. A run in the dump's dtype is replayed
against that trace, which measures the noise. Then the yardstick is replayed against the dump.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from assay.comparison.pairing.matching import match_series
from assay.comparison.pairing.passes import Pass
from assay.comparison.pairing.port_series import Series, collect_series
from assay.dumps.protocol import Dump, DumpedTensor, DumpError
from assay.dumps.readers.assay_trace import AssayReader
from assay.hooks.caches import passed_on
from assay.hooks.module_tracer import ModuleTracer, TraceHandler
from assay.hooks.row_positions import BatchPositions, RowIndex
from assay.hooks.suspension import exact_for
from assay.hooks.tensors import Boundary
from assay.judge.limits import Limits
from assay.judge.replays import (
    Allowances,
    FailedStage,
    Judged,
    find_origin,
    judge_replay,
    rank_stages,
)
from assay.judge.results import PortResult, ReplayResults
from assay.models import count_parameters, load_model
from assay.models.load import chosen_threads, yardstick_dtype
from assay.models.sources import RemoteCode
from assay.progress import subtask
from assay.recording.modules import Recorder
from assay.replay.modules import Replayer, add_error
from assay.replay.ports import BatchSource
from assay.sites import Call, CallSite, RowMap
from assay.trace import TensorEntry, Trace, TraceWriter
from assay.trace.layout import dtype_name

# Function libraries differ in float32: PyTorch's GELU has a mean error of -0.4 unit roundoffs between 1 and 8
# without oneDNN, and 0.002 with it.
FUNCTION_ERROR = 2.0**-24

# Dumps of leaf modules alone hold half of the modules.
_LEAST_REPLAYED = 0.2


@dataclass(frozen=True, slots=True)
class Replayed:
    """The replay of one dump."""

    origin: FailedStage | None
    num_ports: int
    """Number of module boundaries with values in the dump."""


@dataclass(frozen=True, slots=True)
class TrustedModel:
    """The model that replays a dump."""

    model: str
    remote_code: RemoteCode = "refuse"

    def load(self, dtype: str, rounded_to: str | None = None) -> nn.Module:
        """Load the model, with weights rounded to the dtype `rounded_to`."""
        return load_model(
            self.model,
            dtype=dtype,
            attention="eager",
            rounded_to=rounded_to,
            remote_code=self.remote_code,
        ).model


@dataclass(frozen=True, slots=True)
class Reference:
    """The yardstick, and the trace of its run on the tokens of a dump."""

    yardstick: nn.Module
    trace: Trace


def replay_dump(
    trusted: TrustedModel, dump: Dump, passes: Sequence[Pass], dtype: str, limits: Limits
) -> Replayed:
    """Replay the forward passes of a dump on the CPU.

    dtype: dtype of the activations in the dump.
    Raises: DumpError if the dump holds no token ids, UsageError if the model cannot be loaded.
    """
    # Without tokens, a pass holds only what a root such as vLLM's logits_processor computes after forward.
    passes = [one for one in passes if one.ids is not None or one.rows is not None]
    if any(one.ids is None or one.rows is None for one in passes) or not passes:
        raise DumpError(f"{dump.name} holds no token ids: --model needs them to run the model")
    num_parameters = count_parameters(trusted.model)
    with chosen_threads(num_parameters), tempfile.TemporaryDirectory() as folder:
        reference = record_reference(trusted, passes, dtype, Path(folder) / "trace")
        view = DumpedTrace.of(dump, reference.trace)
        boundary = Boundary.exact_inputs_for(getattr(torch, dtype))
        # If the dump lacks the result of a child, its parent computes the child's part too, as must the noise run.
        noise = Replayer(replace(view, values_of=reference.trace), boundary)
        _run("measures the noise", trusted.load(dtype), passes, noise)
        noise_results = noise.finish()
        functions = _find_functions(reference.yardstick)

        def judge(view: DumpedTrace) -> tuple[list[Judged], ReplayResults]:
            replayer = Replayer(view, Boundary(), add_error=_add_dumped_error)
            _run("replays the dump", reference.yardstick, passes, replayer)
            results = replayer.finish()
            for port in results.ports.values():  # the model that ran is wider
                port.dtype = dtype
            least_units = {
                port.stage: FUNCTION_ERROR
                for port in results.ports.values()
                if port.stage.module in functions
            }
            allowances = Allowances(least_units)
            return judge_replay(results, noise_results, limits, allowances)[0], results

        judged, results = judge(view)
        _require_replayed(trusted, dump, reference.trace, results)
        origin = find_origin(rank_stages(judged))
        if origin is not None and view.lacks_mask(origin.stage.module):
            # Its module got no mask. Judge again with the causal mask, which may explain the difference.
            judged, _ = judge(replace(view, supplies_masks=True))
            origin = find_origin(rank_stages(judged)) or origin
    return Replayed(origin, len(results.ports))


def _add_dumped_error(
    result: PortResult,
    index: RowIndex,
    rows: RowMap | None,
    excluded: Tensor | None,
    model: Tensor,
    dumped: Tensor,
) -> None:
    """Add the error of the dumped value: the model that runs is the yardstick."""
    add_error(result, index, rows, excluded, dumped, model)


def record_reference(
    trusted: TrustedModel, passes: Sequence[Pass], dtype: str, folder: Path
) -> Reference:
    """Run the yardstick of a run in `dtype`, and write its trace to `folder`."""
    num_parameters = count_parameters(trusted.model)
    yardstick = trusted.load(yardstick_dtype(num_parameters, ("float64", "float32")), dtype)
    boundary = Boundary.exact_inputs_for(getattr(torch, dtype))
    with TraceWriter(folder, {"dtype": dtype}) as writer:
        _run("records", yardstick, passes, Recorder(writer, boundary))
    return Reference(yardstick, Trace.open(folder))


def _find_functions(model: nn.Module) -> set[str]:
    """Return the modules without parameters or children, such as GELU."""
    return {
        name
        for name, module in model.named_modules()
        if not any(module.children()) and not any(True for _ in module.parameters())
    }


def _require_replayed(
    trusted: TrustedModel, dump: Dump, trace: Trace, results: ReplayResults
) -> None:
    """Raise DumpError if hardly any module of the model has a namesake of the same shape in the dump."""
    replayed = {module for (module, _), port in results.ports.items() if port.sums.num_elements}
    if len(replayed) < _LEAST_REPLAYED * len(trace.modules):
        raise DumpError(
            f"--model {trusted.model}: {len(replayed)} of its {len(trace.modules)} modules are in"
            f" {dump.name} with the same shapes, so it is another model"
        )


@torch.no_grad()
def _run(what: str, model: nn.Module, passes: Sequence[Pass], handler: TraceHandler) -> None:
    tracer = ModuleTracer(handler)
    with (
        exact_for(str(getattr(model, "dtype", "")).removeprefix("torch.")),
        tracer.attached(model),
        subtask(what, len(passes), "passes") as task,
    ):
        for request in _split_requests(passes):
            rows = [one.rows for one in request if one.rows is not None]
            positions = torch.cat([torch.tensor(one.positions) for one in rows], dim=1)
            timeline = BatchPositions(rows[0].prompts, positions)
            tracer.begin_batch(request[0].batch, timeline, request[0].step)
            if isinstance(handler, Replayer):
                handler.source = BatchSource(request[0].batch)
            caches: dict[str, Any] = {}
            end = 0
            for one in request:
                begin, end = end, end + (one.rows.length if one.rows else 0)
                arguments: dict[str, Any] = {"input_ids": one.ids}
                arguments["attention_mask"] = (positions[:, :end] >= 0).long()
                if getattr(model, "can_generate", lambda: False)():
                    arguments |= {
                        "position_ids": positions[:, begin:end].clamp(min=0),
                        "use_cache": True, **caches,
                    }  # fmt: skip
                caches = passed_on(model(**arguments))
                task.advance()


def _split_requests(passes: Sequence[Pass]) -> Iterator[list[Pass]]:
    """Yield the passes that share a cache: a prefill and its decode steps."""
    request: list[Pass] = []
    for one in passes:
        positions = torch.tensor(one.rows.positions if one.rows else ())
        begins = bool((positions == 0).any())
        if request and (begins or one.batch != request[0].batch):
            yield request
            request = []
        request.append(one)
    if request:
        yield request


@dataclass
class DumpedTrace:
    """A dump in the form of a trace, with the call and port names of the running model."""

    calls: list[Call]
    """The calls of the model, each with the ports whose values the dump holds."""
    _series_of: dict[tuple[str, str], Series]
    supplies_masks: bool = False
    """True to supply a causal mask to modules that got none."""
    values_of: Trace | None = None
    """The recording that holds the values; None for the dump."""
    _by_site: dict[CallSite, Call] = field(default_factory=dict)
    _masks: dict[tuple[CallSite, str], tuple[int, ...]] = field(default_factory=dict)
    _last: tuple[str, Tensor] | None = None

    @classmethod
    def of(cls, dump: Dump, trace: Trace) -> "DumpedTrace":
        """Match a dump with `trace`, a recording of the model on the same tokens."""
        recorded = collect_series(AssayReader().open(trace.folder))
        series_of_dump = collect_series(dump)
        forward = {
            port: series for port, series in series_of_dump.items() if port.phase == "forward"
        }
        matching = match_series(recorded, forward)
        series_of = {
            (pair.expected.port.module, pair.expected.port.name): pair.actual
            for pair in matching.pairs
            if pair.expected_span is None and pair.actual_span is None
        }
        masks = {(one.port.module, one.port.name) for one in matching.absent_masks}
        calls = []
        for call in trace.calls:
            at = call.site
            key = at.micro_batch, at.step, at.call
            ports = tuple(
                port
                for port in call.ports
                # `_run` passes the arguments of the model itself.
                if (call.caller is not None or not port.startswith("input."))
                and (series := series_of.get((at.module, port))) is not None
                and _can_replace(series.tensors.get(key, ()), trace.stored(call, port).shape)
            )
            calls.append(replace(call, ports=ports))
        view = cls(calls, series_of)
        view._by_site = {call.site: call for call in calls}
        for call in trace.calls:
            for port in call.ports:
                shape = tuple(trace.stored(call, port).shape)
                if (call.site.module, port) in masks and len(shape) == 4:
                    view._masks[call.site, port] = shape
        return view

    def lacks_mask(self, module: str) -> bool:
        """Return True if `module` got no attention mask in the dump."""
        return any(site.module == module for site, _ in self._masks)

    def find(self, site: CallSite) -> Call | None:
        """Return the call at `site`; None if there is none."""
        call = self._by_site.get(site)
        if call is None or not self.supplies_masks:
            return call
        supplied = tuple(port for at, port in self._masks if at == site)
        return replace(call, ports=(*call.ports, *supplied))

    def stored(self, call: Call, port: str) -> TensorEntry:
        """Return shape and content hash of a tensor."""
        if self.values_of is not None:
            return self.values_of.stored(call, port)
        tensor = self.tensor(call, port)
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        digest = xxhash.xxh3_128_hexdigest(data)
        return TensorEntry(0, port, digest, dtype_name(tensor.dtype), tuple(tensor.shape))

    def tensor(self, call: Call, port: str) -> Tensor:
        """Return the tensor at a port of a call."""
        if self.values_of is not None:
            return self.values_of.tensor(call, port)
        at = call.site
        if (at, port) in self._masks:
            batch, heads, length, num_keys = self._masks[at, port]
            causal = torch.ones(length, num_keys, dtype=torch.bool).tril(num_keys - length)
            return causal.expand(batch, heads, length, num_keys).contiguous()
        (tensor,) = self._series_of[at.module, port].tensors[at.micro_batch, at.step, at.call]
        if self._last is None or self._last[0] != tensor.key:
            self._last = tensor.key, tensor.read()
        return self._last[1]


def _can_replace(tensors: Sequence[DumpedTensor], shape: tuple[int, ...]) -> bool:
    """Return True if the model can continue from a single dumped tensor in place of `shape`."""
    if len(tensors) != 1:
        return False
    # A generation may compute only the logits of the last token.
    fits = tensors[0].shape in (None, shape, (1, *shape[1:]))
    return fits and tensors[0].read_intact() is not None
