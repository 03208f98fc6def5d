"""One pass over the reference's calls: every stage is fed the reference's inputs and measured.

What the running model's own code hands to a child, or returns from one, is compared with what
the reference recorded there, and then replaced by it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from assay.comparing.results import PortResult, ReplayResults
from assay.hooks.boundary import Boundary
from assay.hooks.caches import CacheTracker
from assay.hooks.in_place_changes import InPlaceChanges
from assay.hooks.module_tracer import ActiveCall
from assay.hooks.nested import iterate_leaves, iterate_tensors, map_tensors
from assay.hooks.tensor_map import TensorMap
from assay.hooks.timeline import RowIndex
from assay.locating.batch_source import BatchSource
from assay.locating.masks import (
    COMPARABLE_IMPLEMENTATIONS,
    count_differences,
    in_form_of,
    is_attention_mask,
)
from assay.locating.port_matching import ancestors, recorded_names
from assay.locating.rank_layout import RankLayout, layout_of
from assay.locating.routing import find_scores, near_tie_rows
from assay.metrics import PairSums
from assay.sites import Call, CallSite, RowMap
from assay.stages import Stage, stage_that_made
from assay.trace import Trace


def _is_every_call(site: CallSite) -> bool:
    del site
    return True


@dataclass(slots=True)
class _Matched:
    """A call under way and its partner in the trace."""

    call: Call
    rows: RowMap | None
    caches: dict[Any, Any]
    changes: InPlaceChanges | None = None
    seen: set[str] = field(default_factory=set)
    excluded: Tensor | None = None  # rows of a router whose choice is a near tie
    scores: str = ""  # the port by which it chooses: compared in all rows


@dataclass
class Replayer:
    """A listener that measures a model against `trace` and feeds it the trace's values.

    attention: the attention implementation of the model that runs.
    pointwise: modules whose own code only rounds element by element.
    score_noise: root mean square error, in a healthy run, of the scores by which a router chooses,
        by module and port; the candidate's own error would excuse a wrong router.
    layout: how a rank's tensors are parts of whole ones; None where they are whole.
    divided: modules that this process has only some children of: they are run, and not measured.
    unmeasured: modules and ports that are left as they are.
    recomputed: what calls made again in backward were given, and gave.
    """

    trace: Trace
    boundary: Boundary
    attention: str = "eager"
    pointwise: frozenset[str] = frozenset()
    score_noise: Mapping[tuple[str, str], float] | None = None
    layout: RankLayout | None = None
    partial_modules: frozenset[str] = frozenset()
    unmeasured: frozenset[tuple[str, str]] = frozenset()
    results: ReplayResults = field(default_factory=ReplayResults)
    recomputed: ReplayResults = field(default_factory=ReplayResults)
    source: BatchSource = field(default_factory=lambda: BatchSource(0))
    _injected: TensorMap[str] = field(default_factory=TensorMap)  # handed on -> its content
    _caches: CacheTracker = field(default_factory=CacheTracker)
    _index: RowIndex = field(default_factory=lambda: RowIndex(None))
    _called: set[CallSite] = field(default_factory=set)

    def enter(self, active: ActiveCall) -> None:
        """Compare and replace the arguments of a call that the trace knows."""
        if active.call.caller is None:
            self._caches.begin_root()
            self._injected.clear()
            self._index = RowIndex(None)
        if active.call.site.module in self.partial_modules:
            self._enter_partial_module(active)
            return
        expected = self._partner(active)
        if expected is None:
            self.results.note_extra_call(active.call.site)
            return
        self._called.add(expected.site)
        matched = _Matched(expected, self.source.select_rows(expected.rows), {})
        if active.call.caller is None:
            self._index = RowIndex(matched.rows)
        active.state = matched
        names = recorded_names(active.arguments, expected.ports)
        for name, value in active.arguments.items():
            port = f"input.{names[name]}"
            active.arguments[name] = map_tensors(
                value, port, lambda port, tensor: self._measure_and_replace(active, port, tensor)
            )
        self._supply_masks(active)
        matched.caches = self._caches.snapshot(active.arguments)
        matched.changes = InPlaceChanges(active.arguments)

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see Listener
        """Compare and replace the results of a call that the trace knows."""
        matched: _Matched | None = active.state
        if matched is None:
            return output
        self._replace_changes(active)
        matched.excluded = self._near_ties(active, output)
        output = map_tensors(
            output, "output", lambda port, tensor: self._measure_and_replace(active, port, tensor)
        )
        length = matched.rows.length if matched.rows is not None else None
        for addition in self._caches.additions(active.arguments, matched.caches, length):
            # Measured later: the cache itself is about to be overwritten.
            added = addition.tensor.clone()
            injected = self._measure_and_replace(active, addition.port, added)
            if injected is not added:
                addition.tensor.copy_(injected)
            result = self._result(active, addition.port, addition.tensor)
            result.exact.add(1, int(addition.history_changed))
        self._note_missing_ports(active, output)
        return output

    def finish_root(self, active: ActiveCall) -> None:
        """Nothing is kept over root calls but the sums."""
        del active
        self._injected.clear()

    def recognises(self, value: Tensor) -> bool:
        """Whether this very object was handed on."""
        return self._injected.get(value) is not None

    def alias(self, new: Tensor, known: Tensor) -> None:
        """From now on `new` is what `known` is."""
        content = self._injected.get(known)
        if content is not None:
            self._injected.put(new, content)

    def finish(self, is_own: Callable[[CallSite], bool] = _is_every_call) -> ReplayResults:
        """The results, with every expected call that was not made.

        is_own: whether this process had to make a call that the trace has.
        """
        self.results.flush()
        made = {(site.step, site.micro_batch, site.module) for site in self._called}
        for call in self.trace.calls:
            if call.site.phase == "forward" and call.site not in self._called:
                at = call.site
                if not is_own(at):
                    continue
                replaced_by_ancestor = any(
                    (at.step, at.micro_batch, parent) in made for parent in ancestors(at.module)
                )
                self.results.note_missing_call(at, replaced_by_ancestor=replaced_by_ancestor)
        return self.results

    def _enter_partial_module(self, active: ActiveCall) -> None:
        expected = self._find(active)
        if expected is not None and active.call.caller is None:
            self._index = RowIndex(self.source.select_rows(expected.rows))

    def _find(self, active: ActiveCall) -> Call | None:
        site = active.call.site
        return self.trace.find(
            CallSite(site.step, site.module, site.call, micro_batch=self.source.batch)
        )

    def _partner(self, active: ActiveCall) -> Call | None:
        expected = self._find(active)
        if expected is None:
            return None
        names = recorded_names(active.arguments, expected.ports)
        for name, value in active.arguments.items():
            for port, tensor in iterate_tensors(value, f"input.{names[name]}"):
                if port in expected.ports and tensor.is_floating_point() and tensor.ndim != 4:
                    recorded = self.trace.stored(expected, port).shape
                    shape = self.source.selected_shape(recorded, expected.rows)
                    layout = layout_of(self.layout, expected.site.module, port, tensor, shape)
                    alike = shape == tensor.shape or _is_for_any_row(shape, tuple(tensor.shape))
                    if not alike and layout is None:
                        return None
        return expected

    def _measure_and_replace(self, active: ActiveCall, port: str, actual: Tensor) -> Tensor:
        """Measure `actual` and return what takes its place."""
        matched: _Matched = active.state
        if port not in matched.call.ports:
            self.results.note_extra_port(active.call.site.module, port)
            return actual
        matched.seen.add(port)
        if (active.call.site.module, port) in self.unmeasured:
            return actual
        key = self.trace.stored(matched.call, port).digest
        if self._injected.get(actual) == key:
            self.results.num_identical += 1
            return actual
        expected = self.source.select(self.trace.tensor(matched.call, port), matched.call.rows)
        result = self._result(active, port, actual)
        if is_attention_mask(port, expected):
            return self._replace_mask(result, matched, actual, expected)
        module, shape, value = active.call.site.module, tuple(expected.shape), actual.detach()
        layout = layout_of(self.layout, module, port, value, shape)
        if layout is not None:
            value = layout.whole(module, port, value, shape)
        value = value.cpu()
        if _is_for_any_row(tuple(expected.shape), tuple(value.shape)):
            expected = expected.expand_as(value)
        if value.shape != expected.shape:
            result.exact.add(expected.numel(), expected.numel())
            return actual
        excluded = matched.excluded if port != matched.scores else None
        injected = self.boundary.injected(expected, actual.dtype)
        # What was kept for a recomputation is what was handed on before.
        kept = active.is_recompute and port.startswith("input.") and torch.equal(value, injected)
        if not kept:
            self._measure(result, matched.rows, excluded, value, expected)
        injected = injected.to(actual.device)
        if layout is not None:
            injected = layout.part(module, port, injected)
        self._injected.put(injected, key)
        return injected

    def _replace_changes(self, active: ActiveCall) -> None:
        """Arguments changed in place: what is not changed in the reference must not be here."""
        matched: _Matched = active.state
        if matched.changes is None:
            return
        for port, tensor in matched.changes.changed():
            self._injected.forget(tensor)
            value = tensor.clone()
            name = f"changed.{port}"
            if name not in matched.call.ports:
                result = self._result(active, name, value)
                result.exact.add(value.numel(), value.numel())
                continue
            injected = self._measure_and_replace(active, name, value)
            if injected is not value:
                tensor.copy_(injected)

    def _measure(
        self,
        result: PortResult,
        rows: RowMap | None,
        excluded: Tensor | None,
        actual: Tensor,
        expected: Tensor,
    ) -> None:
        if rows is not None and expected.shape == (rows.num_rows, rows.length):
            actual, expected = actual[..., None], expected[..., None]  # one number for each token
        (actual_RC, expected_RC), prompt, position = self._index.flatten(actual, expected)
        if excluded is not None and len(excluded) == expected.shape[0]:
            keep = ~self._index.flatten(excluded[:, None].expand(expected.shape))[0][0][:, 0]
            result.exact.num_near_ties += int((~keep).sum())
            actual_RC, expected_RC = actual_RC[keep], expected_RC[keep]
            prompt, position = prompt[keep], position[keep]
        if expected.is_floating_point():
            padding, expected_padding = self._index.padding(actual, expected)
            nonfinite_padding = ~padding.isfinite() & expected_padding.isfinite()
            result.num_nonfinite_padding += int(nonfinite_padding.sum())
            if actual.dtype is torch.float64:
                actual_RC = actual_RC.to(expected.dtype)  # the yardstick, as it was stored
            result.sums.add_later(actual_RC, expected_RC, prompt, position)
            return
        different = (actual_RC != expected_RC).any(-1)
        result.exact.add(len(different), int(different.sum()))
        if bool(different.any()) and result.exact.first == (-1, -1):
            first = int(different.nonzero()[0])
            result.exact.first = (int(prompt[first]), int(position[first]))

    def _replace_mask(
        self, result: PortResult, matched: _Matched, actual: Tensor, expected: Tensor
    ) -> Tensor:
        if self.attention not in COMPARABLE_IMPLEMENTATIONS:
            return actual
        compared, different = count_differences(actual, expected, matched.rows)
        result.exact.add(compared, different)
        if actual.shape[-2:] != expected.shape[-2:]:
            return actual
        return in_form_of(actual, expected).to(actual.device)

    def _supply_masks(self, active: ActiveCall) -> None:
        """Where the reference has a mask and the model none, it must mean the causal one."""
        matched: _Matched = active.state
        if self.attention not in COMPARABLE_IMPLEMENTATIONS:
            return
        for name, value in active.arguments.items():
            port = f"input.{name}"
            if value is not None or port not in matched.call.ports:
                continue
            expected = self.source.select(self.trace.tensor(matched.call, port), matched.call.rows)
            if not is_attention_mask(port, expected):
                continue
            matched.seen.add(port)
            compared, different = count_differences(None, expected, matched.rows)
            self._result(active, port, expected).exact.add(compared, different)
            if different:
                dtype = next(
                    (p.dtype for p in active.module.parameters() if p.is_floating_point()),
                    torch.float32,
                )
                device = next((p.device for p in active.module.parameters()), expected.device)
                active.arguments[name] = in_form_of(torch.zeros(0, dtype=dtype), expected).to(
                    device
                )

    def _near_ties(self, active: ActiveCall, output: Any) -> Tensor | None:  # noqa: ANN401
        matched: _Matched = active.state
        tensors = {
            port: tensor.detach().cpu()
            for port, tensor in iterate_tensors(output, "output")
            if port in matched.call.ports and tensor.ndim == 2
        }
        choices = {port: t for port, t in tensors.items() if not t.is_floating_point()}
        if not choices or len(choices) == len(tensors):
            return None
        recorded = {
            port: self.source.select(self.trace.tensor(matched.call, port), matched.call.rows)
            for port in tensors
        }
        for port, actual in choices.items():
            scores = find_scores(recorded[port], {p: recorded[p] for p in tensors if p != port})
            if scores is not None and actual.shape == recorded[port].shape:
                error = self._score_error(active, scores, tensors[scores], recorded[scores])
                matched.scores = scores
                return near_tie_rows(actual, recorded[port], recorded[scores], error)
        return None

    def _score_error(
        self, active: ActiveCall, port: str, actual: Tensor, expected: Tensor
    ) -> float:
        if self.score_noise is not None:
            return self.score_noise.get((active.call.site.module, port), 0.0)
        return float((actual.double() - expected.double()).pow(2).mean().sqrt())

    def _result(self, active: ActiveCall, port: str, value: Tensor) -> PortResult:
        key = (active.call.site.module, port)
        results = self.recomputed if active.is_recompute else self.results
        result = results.ports.get(key)
        if result is None:
            stage = stage_that_made(active.call, port)
            if active.is_recompute:
                stage = Stage(stage.module, "backward")
            made_here = not port.startswith("input.")
            pointwise = stage.module in self.pointwise
            result = PortResult(
                *key,
                stage,
                len(results.ports),
                str(value.dtype).removeprefix("torch."),
                active.call.class_name if made_here else "",
                pointwise=pointwise,
                sums=PairSums(counts_misrounded=pointwise),
            )
            results.ports[key] = result
        return result

    def _note_missing_ports(self, active: ActiveCall, output: Any) -> None:  # noqa: ANN401
        matched: _Matched = active.state
        absent = set(matched.call.ports) - matched.seen
        if not absent:
            return
        # An optional argument that this code does not use, and results that it does not give.
        given = {
            f"input.{name}"
            for name in recorded_names(active.arguments, matched.call.ports).values()
        }
        offered_none = {
            port
            for name, value in [*active.arguments.items(), ("", output)]
            for port, leaf in iterate_leaves(value, f"input.{name}" if name else "output")
            if leaf is None
        } | {
            port
            for port in absent
            if port.startswith("input.") and ".".join(port.split(".")[:2]) not in given
        }
        for port in sorted(absent - offered_none):
            self.results.note_missing_port(active.call.site.module, port)


def _is_for_any_row(expected: tuple[int, ...], actual: tuple[int, ...]) -> bool:
    """Whether the reference has once what this run has for each row, as positions are written."""
    return expected[:1] == (1,) and actual[:1] > (1,) and expected[1:] == actual[1:]
