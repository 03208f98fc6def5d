"""Replay: one pass over the reference's calls that measures every stage on the reference's inputs.

Each value that the running model passes to a child or returns from one is measured against the recorded
value, and then replaced by it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from assay.hooks.caches import CHANGED, KEPT, CacheBefore, CacheTracker
from assay.hooks.module_tracer import ActiveCall, NullHandler
from assay.hooks.row_positions import RowIndex
from assay.hooks.tensors import (
    Boundary,
    InPlaceChanges,
    TensorMap,
    iterate_tensors,
    laid_out_as,
    replace_tensors,
    write_injected,
)
from assay.judge.results import PortResult, ReplayResults
from assay.kernel import sum_pair
from assay.replay.ports import (
    COMPARABLE_IMPLEMENTATIONS,
    PADDING_MASK,
    BatchSource,
    MaskDifference,
    PartQueue,
    RankLayout,
    ancestors,
    count_differences,
    find_trailing,
    implied_mask,
    in_form_of,
    is_attention_mask,
    is_mask_of_pairs_for_padding,
    is_padding_mask,
    layout_of,
    mask_for,
    missing_ports,
    recorded_names,
)
from assay.replay.routing import (
    find_choice,
    find_order,
    may_be_routing,
    near_tie_rows,
    root_mean_square,
)
from assay.replay.trace_views import ReplayedTrace
from assay.sites import Call, CallSite, LocalPart, RowMap
from assay.stages import Stage, stage_that_made


def add_error(
    result: PortResult,
    index: RowIndex,
    rows: RowMap | None,
    excluded: Tensor | None,
    actual: Tensor,
    expected: Tensor,
) -> tuple[Tensor, Tensor]:
    """Add the error of `actual` to `result`. Integers and flags count as equal or different rows.

    index: addresses of the rows of the call.
    excluded: batch rows to leave out, (B,) bool.
    Shapes: actual and expected alike.
    Returns: the compared rows of both, (R, C).
    """
    actual, expected = as_real(actual), as_real(expected)
    if rows is not None and expected.shape == (rows.num_rows, rows.length):
        actual, expected = actual[..., None], expected[..., None]  # one number for each token
    (actual_RC, expected_RC), prompt, position = index.flatten(actual, expected)
    num_padding = index.num_padding(actual)
    result.num_padding += num_padding
    if excluded is not None and len(excluded) == expected.shape[0]:
        of_rows = excluded.reshape(-1, *[1] * (expected.ndim - 1)).expand(expected.shape)
        keep = ~index.flatten(of_rows)[0][0][:, 0]
        result.exact.num_near_ties += int((~keep).sum())
        actual_RC, expected_RC = actual_RC[keep], expected_RC[keep]
        prompt, position = prompt[keep], position[keep]
    if expected.is_floating_point():
        if num_padding:
            (padding,) = index.padding(actual)
            if not math.isfinite(padding.sum(dtype=torch.float64)):
                wrong = ~padding.isfinite() & index.padding(expected)[0].isfinite()
                result.num_nonfinite_padding += int(wrong.sum())
        if actual.dtype is torch.float64:
            actual_RC = actual_RC.to(expected.dtype)  # the yardstick, in the dtype of the trace
        result.sums.add_later(actual_RC, expected_RC, prompt, position)
        return actual_RC, expected_RC
    different = (actual_RC != expected_RC).any(-1)
    numbers = different.nonzero()[:, 0].tolist()
    first = (int(prompt[numbers[0]]), int(position[numbers[0]])) if numbers else (-1, -1)
    result.exact.add(len(different), len(numbers), first)
    return actual_RC, expected_RC


AddError = Callable[[PortResult, RowIndex, RowMap | None, Tensor | None, Tensor, Tensor], object]
"""The type of `add_error`."""


def as_real(tensor: Tensor) -> Tensor:
    """Return complex numbers as pairs of real ones along the last dim, and other tensors unchanged.

    Shapes: complex (..., C) to (..., 2 C).
    """
    if not tensor.is_complex():
        return tensor
    return torch.view_as_real(tensor.resolve_conj()).reshape(*tensor.shape[:-1], -1)


def is_broadcast_over_rows(expected: tuple[int, ...], actual: tuple[int, ...]) -> bool:
    """Return True if the reference has one row for all rows of this run, as for positions."""
    return expected[:1] == (1,) and actual[:1] > (1,) and expected[1:] == actual[1:]


@dataclass
class DriftMeter(NullHandler):
    """A handler that compares the main result of every module and changes nothing."""

    trace: ReplayedTrace
    source: BatchSource = field(default_factory=lambda: BatchSource(0))
    """The running batch in the trace. The caller sets it before each batch."""
    sums: dict[str, list[float]] = field(default_factory=dict)
    """By module, the sums of squared errors and of squared expected values."""
    _index: RowIndex = field(default_factory=lambda: RowIndex(None))

    def enter(self, active: ActiveCall) -> None:
        """Begin a root call; arguments are not compared."""
        if active.call.caller is None:
            self._index = RowIndex(None)

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see TraceHandler
        """Compare the first floating-point result."""
        at = active.call.site
        expected = self.trace.find(
            CallSite(at.step, at.module, at.call, micro_batch=self.source.batch)
        )
        if expected is None:
            return output
        for port, tensor in iterate_tensors(output, "output"):
            if tensor.is_floating_point() and port in expected.ports:
                recorded = self.source.select(self.trace.tensor(expected, port), expected.rows)
                rows = self.source.select_rows(expected.rows)
                if self._index.rows is not rows:
                    self._index = RowIndex(rows)
                self._add(at.module, tensor, recorded)
                break
        return output

    def relative_errors(self) -> dict[str, float]:
        """Return ||actual - expected|| / ||expected|| of each module, over all its calls.

        nan where a value is not finite on one side, or another one on the other; 1 where only
        the recorded side is zero.
        """
        return {module: (dd / (ee or dd or 1.0)) ** 0.5 for module, (dd, ee) in self.sums.items()}

    def _add(self, module: str, tensor: Tensor, recorded: Tensor) -> None:
        actual = tensor.detach().cpu()
        if actual.shape != recorded.shape:
            return
        (actual_RC, expected_RC), _, _ = self._index.flatten(actual, recorded)
        found = sum_pair(actual_RC, expected_RC, "norms")
        sums = self.sums.setdefault(module, [0.0, 0.0])
        _, error, _ = found.rows  # nan in a row with a wrong value that is not finite
        sums[0] += math.nan if bool(error.isnan().any()) else found.dd
        sums[1] += found.ee


@dataclass(slots=True)
class _Matched:
    """A running call, matched to one in the trace."""

    call: Call
    rows: RowMap | None
    caches: Sequence[CacheBefore] = ()
    changes: InPlaceChanges | None = None
    """Changes of its arguments since its start."""
    seen: set[str] = field(default_factory=set)
    """Its ports so far."""
    excluded: Tensor | None = None
    """Batch rows in which the choice of a router is a near tie."""
    scores: str = ""
    """The port of the scores by which the router chooses. It is measured in all rows."""
    order: Tensor | None = None
    """Columns of the router's results in the reference's order; None if they are in that order."""

    @property
    def first_token(self) -> tuple[int, int]:
        """Return prompt and position of the first token; (-1, -1) if they are unknown."""
        return (-1, -1) if self.rows is None else self.rows.first_token

    def in_order(self, value: Tensor) -> Tensor:
        """Put the columns of a router's result in the reference's order; return others unchanged."""
        if self.order is None or value.shape != self.order.shape:
            return value
        return value.gather(-1, self.order.to(value.device))


@dataclass
class _RootCall:
    """The state of one root call, and of the calls in it that backward repeats."""

    index: RowIndex = field(default_factory=lambda: RowIndex(None))
    injected: TensorMap[str] = field(default_factory=TensorMap)
    """By injected value, the digest of the recorded value."""
    absent_masks: dict[tuple[str, str, RowMap | None], tuple[Tensor, MaskDifference] | None] = (
        field(default_factory=dict)
    )
    """Recorded masks where the model has none, with the number of their pairs, and of those that differ
    from the causal mask, by port, digest and rows. None: it is not a mask."""
    chosen: dict[tuple[CallSite, str], Tensor] = field(default_factory=dict)
    """Own choices, such as experts, by call and port."""

    @cached_property
    def last_index(self) -> RowIndex:
        """Addresses of values without an axis of tokens: those of the last token of each row."""
        rows = self.index.rows
        return RowIndex(rows and RowMap(rows.prompts, tuple((max(of),) for of in rows.positions)))


class ValueObserver(Protocol):
    """Sees the values of a replay."""

    def measure(self, site: CallSite, port: str, value: Tensor, expected: Tensor) -> None:
        """Take the value of the model, and the recorded one."""

    def inject(self, site: CallSite, port: str, value: Tensor) -> None:
        """Take the value that replaces the model's."""

    def alias(self, new: Tensor, known: Tensor) -> None:
        """Take another object with the value of an injected one."""

    def overwrite(self, value: Tensor) -> None:
        """Take a tensor before the recorded value is written to it."""


@dataclass
class Replayer:
    """A handler that measures a model against `trace`, and injects the trace's values."""

    trace: ReplayedTrace
    boundary: Boundary
    attention: str = "eager"
    """The attention implementation of the running model."""
    pointwise: frozenset[str] = frozenset()
    """Modules whose own code only rounds element by element."""
    score_noise: Mapping[tuple[str, str], float] | None = None
    """Root mean square error of a router's scores in a healthy run, by module and port. The
    candidate's own error would excuse a wrong router."""
    layout: RankLayout | None = None
    """The sharding of a rank's tensors; None if they are whole."""
    partial_modules: frozenset[str] = frozenset()
    """Modules of which this process has only some children. They run and are not measured."""
    unmeasured: frozenset[tuple[str, str]] = frozenset()
    """Modules and ports that are neither measured nor replaced, and may be absent."""
    add_error: AddError = add_error
    """Adds the error of the model's value, given before the recorded one."""
    results: ReplayResults = field(default_factory=ReplayResults)
    recomputed: ReplayResults = field(default_factory=ReplayResults)
    """Results of calls that backward repeats."""
    source: BatchSource = field(default_factory=lambda: BatchSource(0))
    """The running batch in the trace. The caller sets it before each batch."""
    observer: ValueObserver | None = None
    _parts: PartQueue = field(default_factory=PartQueue)
    _caches: CacheTracker = field(default_factory=CacheTracker)
    _called: set[CallSite] = field(default_factory=set)
    _root: _RootCall = field(default_factory=_RootCall)

    def enter(self, active: ActiveCall) -> None:
        """Measure and replace the arguments of a call that is in the trace."""
        if active.call.caller is None:
            self._caches.begin_root()
            self._root = _RootCall()
        if active.call.site.module in self.partial_modules:
            whole = self._find_call(active) if active.call.caller is None else None
            if whole is not None:  # its rows are those of the calls inside it
                self._root.index = RowIndex(self.source.select_rows(whole.rows))
            return
        expected = self._find_call(active)
        names = {} if expected is None else recorded_names(active.arguments, expected.ports)
        if expected is None or not self._have_its_shapes(active.arguments, expected, names):
            self.results.note_extra_call(active.call.site)
            return
        self._called.add(expected.site)
        if self._may_mix_padding(expected):
            return
        matched = _Matched(expected, self.source.select_rows(expected.rows))
        if active.call.caller is None:
            self._root.index = RowIndex(matched.rows)
        active.state = matched
        replace_port = partial(self._measure_and_replace, active)
        for name, value in active.arguments.items():
            active.arguments[name] = replace_tensors(value, f"input.{names[name]}", replace_port)
        if active.call.caller is None:
            self._supply_padding(active)
        self._supply_masks(active)
        matched.caches = self._caches.snapshot(active.arguments)
        matched.changes = InPlaceChanges(active.arguments)

    def _may_mix_padding(self, call: Call) -> bool:
        """Return True for rows in groups, such as those of experts, of a batch with padding.

        Attention of padding differs between implementations, so its rows may be in another group.
        """
        if not call.group_totals or call.rows is None or not call.rows.has_padding:
            return False
        num_tokens = call.rows.num_rows * call.rows.length
        totals = {total for total in call.group_totals if not total % num_tokens}
        return any(self.trace.stored(call, port).shape[0] in totals for port in call.ports)

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see TraceHandler
        """Measure and replace the results of a call that is in the trace."""
        matched: _Matched | None = active.state
        if matched is None:
            return output
        self._replace_changes(active)
        self._find_near_ties(active, output)
        output = replace_tensors(output, "output", partial(self._measure_and_replace, active))
        for addition in self._caches.additions(matched.caches):
            # Measured later: the cache is about to be overwritten.
            added = addition.tensor.clone()
            index = self._root.index if addition.has_tokens else self._root.last_index
            self._show_own(active, addition.port, addition.tensor)
            injected = self._measure_and_replace(active, addition.port, added, index)
            if injected is not added:
                self._write_over(addition.tensor, injected)
            if addition.history is not None and self.observer is not None:
                port = addition.port.replace(CHANGED, KEPT)
                self.observer.measure(active.call.site, port, *addition.history)
            if addition.history_changed is not None:
                result = self._result(active, addition.port, addition.tensor)
                is_changed = addition.history_changed
                first = matched.first_token if is_changed else (-1, -1)
                result.exact.add(1, int(is_changed), first)
        for port in missing_ports(matched.call.ports, matched.seen, active.arguments, output):
            if (active.call.site.module, port) not in self.unmeasured:
                self.results.note_missing_port(active.call.site.module, port)
        return output

    def finish_root(self, active: ActiveCall) -> None:
        """Forget the injected values; only sums outlive a root call."""
        for cache in self._caches.find_unreadable():
            self.results.note_unreadable_cache(active.call.site.module, cache)
        self._parts.flush()
        self._root.injected.clear()

    def recognizes(self, value: Tensor) -> bool:
        """Return True if this object was injected."""
        return self._root.injected.get(value) is not None

    def alias(self, new: Tensor, known: Tensor) -> None:
        """Treat `new` as the injected value `known` from now on."""
        content = self._root.injected.get(known)
        if content is not None:
            self._root.injected.put(new, content)
        if self.observer is not None:
            self.observer.alias(new, known)

    def in_order(self, active: ActiveCall, made: Tensor) -> Tensor:
        """Return a result of a call, with a router's columns in the reference's order."""
        matched: _Matched = active.state
        return matched.in_order(made)

    def finish(self, is_own: Callable[[CallSite], bool] = lambda _: True) -> ReplayResults:
        """Note expected calls that were not made, and return the results. Called after the last batch.

        is_own: returns True for a recorded call that this process had to make.
        """
        self.results.flush()
        made = {(site.step, site.micro_batch, site.module) for site in self._called}
        for call in self.trace.calls:
            at = call.site
            if at.phase == "forward" and at not in self._called and is_own(at):
                is_inside_called = any(
                    (at.step, at.micro_batch, parent) in made for parent in ancestors(at.module)
                )
                self.results.note_missing_call(at, is_inside_called=is_inside_called)
        return self.results

    def _find_call(self, active: ActiveCall) -> Call | None:
        """Find the recorded call at the same place."""
        site = active.call.site
        return self.trace.find(
            CallSite(site.step, site.module, site.call, micro_batch=self.source.batch)
        )

    def _recorded(self, call: Call, port: str) -> Tensor:
        """Return the recorded tensor at a port, for the running rows."""
        return self.source.select(self.trace.tensor(call, port), call.rows)

    def _have_its_shapes(
        self, arguments: Mapping[str, Any], expected: Call, names: Mapping[str, str]
    ) -> bool:
        """Return True if `arguments` have the shapes of those of the recorded call `expected`.

        names: those of the arguments in the trace.
        """
        for name, value in arguments.items():
            for port, tensor in iterate_tensors(value, f"input.{names[name]}"):
                if port in expected.ports and tensor.is_floating_point() and tensor.ndim != 4:
                    recorded = self.trace.stored(expected, port).shape
                    if recorded == tensor.shape:
                        continue
                    shape = self.source.selected_shape(recorded, expected.rows)
                    layout = layout_of(self.layout, expected.site.module, port, tensor, shape)
                    alike = shape == tensor.shape or is_broadcast_over_rows(
                        shape, tuple(tensor.shape)
                    )
                    if not alike and layout is None:
                        return False
        return True

    def _measure_and_replace(
        self, active: ActiveCall, port: str, actual: Tensor, index: RowIndex | None = None
    ) -> Tensor:
        """Measure `actual` and return its replacement. index: that of the root call by default."""
        matched: _Matched = active.state
        self._show_own(active, port, actual)
        if port not in matched.call.ports:
            self.results.note_extra_port(active.call.site.module, port)
            return actual
        matched.seen.add(port)
        stored = self.trace.stored(matched.call, port)
        unmeasured = (active.call.site.module, port) in self.unmeasured
        if unmeasured or is_mask_of_pairs_for_padding(port, actual, stored.shape):
            return actual
        key = stored.digest
        if self._root.injected.get(actual) == key:
            self.results.num_identical += 1
            return actual
        expected = self._recorded(matched.call, port)
        result = self._result(active, port, actual)
        if is_padding_mask(port, expected) or is_attention_mask(port, expected):
            return self._replace_mask(result, active, port, actual, expected)
        module, shape, value = active.call.site.module, expected.shape, actual.detach()
        layout = layout_of(self.layout, module, port, value, shape)
        if layout is None:
            value = value.cpu()
            if value.shape != shape and is_broadcast_over_rows(shape, value.shape):
                expected = expected.expand_as(value)
            if value.shape != expected.shape or value.is_complex() != expected.is_complex():
                result.exact.add(expected.numel(), expected.numel())
                return actual
        injected = self.boundary.injected(expected, actual.dtype)
        excluded = matched.excluded if port != matched.scores else None
        measure = partial(
            self._measure, result, active, index or self._root.index, excluded, expected, injected
        )
        injected = injected.to(actual.device)
        if layout is None:
            measure(matched.in_order(value))
        else:
            self._parts.add(layout, LocalPart(module, port, value, shape), measure)
            if active.is_recompute:  # after its root call
                self._parts.flush()
            injected = layout.part(module, port, injected)
        injected = laid_out_as(injected, actual.detach())
        self._root.injected.put(injected, key)
        return self.show_injected(active.call.site, port, injected)

    def _measure(
        self, result: PortResult, active: ActiveCall, index: RowIndex, excluded: Tensor | None,
        expected: Tensor, injected: Tensor, value: Tensor,
    ) -> None:  # fmt: skip
        """Add the error of a whole value at a port. excluded: rows that a near tie may decide."""
        # A recomputation gets the values that were injected before.
        is_repeated = active.is_recompute and result.port.startswith("input.")
        if is_repeated and torch.equal(value, injected):
            return
        chosen = self._choice_of_forward(active, result.port, value)
        if chosen is not None:
            expected, excluded = chosen, None
        matched: _Matched = active.state
        self.add_error(result, index, matched.rows, excluded, value, expected)

    def _choice_of_forward(self, active: ActiveCall, port: str, value: Tensor) -> Tensor | None:
        """Return the choice, such as experts, of the same call in forward, if this is a recomputation.

        It has the same inputs, so the candidate's own first choice is the expected one.
        """
        if port.startswith("input.") or value.is_floating_point():
            return None
        if active.is_recompute:
            return self._root.chosen.get((active.call.site, port))
        self._root.chosen[active.call.site, port] = value
        return None

    def _replace_changes(self, active: ActiveCall) -> None:
        """Measure arguments that were changed in place. Only those that the reference changes may be."""
        matched: _Matched = active.state
        if matched.changes is None:
            return
        for port, tensor in matched.changes.changed():
            self._root.injected.forget(tensor)
            value = tensor.clone()
            name = f"changed.{port}"
            if name not in matched.call.ports:
                result = self._result(active, name, value)
                result.exact.add(value.numel(), value.numel(), matched.first_token)
                continue
            injected = self._measure_and_replace(active, name, value)
            if injected is not value:
                self._write_over(tensor, injected)

    def _show_own(self, active: ActiveCall, port: str, value: Tensor) -> None:
        """Let the observer see the model's value at a port; one that backward repeats is of that phase."""
        if self.observer is None:
            return
        matched: _Matched = active.state
        if port not in matched.call.ports:
            return
        site = active.call.site.backward if active.is_recompute else active.call.site
        self.observer.measure(site, port, value, self._recorded(matched.call, port))

    def show_injected(self, site: CallSite, port: str, value: Tensor) -> Tensor:
        """Let the observer see the value that replaces the model's, and return it."""
        if self.observer is not None:
            self.observer.inject(site, port, value)
        return value

    def _write_over(self, target: Tensor, injected: Tensor) -> None:
        if self.observer is not None:
            self.observer.overwrite(target)
        write_injected(target, injected)

    def _replace_mask(
        self, result: PortResult, active: ActiveCall, port: str, actual: Tensor, expected: Tensor
    ) -> Tensor:
        matched: _Matched = active.state
        if is_padding_mask(port, expected):
            return self._replace_padding(result, active, port, actual, expected)
        if self.attention not in COMPARABLE_IMPLEMENTATIONS:
            return actual
        result.exact.add(*count_differences(actual, expected, matched.rows))
        if actual.shape[-2:] != expected.shape[-2:]:
            return actual
        injected = laid_out_as(in_form_of(actual, expected).to(actual.device), actual)
        self._root.injected.put(injected, self.trace.stored(matched.call, port).digest)
        return injected

    def _replace_padding(
        self, result: PortResult, active: ActiveCall, port: str, actual: Tensor, expected: Tensor
    ) -> Tensor:
        """Compare and replace a mask of padding, except after the last token of a row.

        Only attention in both directions reads that part. Its own mask shows an error there. A right mask
        stays, because its numbers may tell packed rows apart.
        """
        matched: _Matched = active.state
        own = actual.detach().cpu() != 0
        if own.shape != expected.shape:
            result.exact.add(expected.numel(), expected.numel())
            return actual
        is_trailing = find_trailing(matched.rows, tuple(expected.shape))
        is_wrong = (own != (expected != 0)) & ~is_trailing
        wrong_rows, first = is_wrong.any(-1).nonzero()[:, 0].tolist(), (-1, -1)
        if wrong_rows and matched.rows is not None and matched.rows.num_rows == len(expected):
            first = matched.rows.prompts[wrong_rows[0]], -1
        result.exact.add(int((~is_trailing).sum()), int(is_wrong.sum()), first)
        injected = actual
        if wrong_rows:
            own = torch.where(is_trailing, own, expected != 0)
            injected = laid_out_as(own.to(actual.dtype).to(actual.device), actual.detach())
        if torch.equal(own, expected != 0):
            self._root.injected.put(injected, self.trace.stored(matched.call, port).digest)
        return self.show_injected(active.call.site, port, injected)

    def _supply_padding(self, active: ActiveCall) -> None:
        """Check that a batch without `attention_mask` needs none. Positions replace it in packed rows."""
        matched: _Matched = active.state
        arguments, port = active.arguments, f"input.{PADDING_MASK}"
        given = (arguments.get(PADDING_MASK), arguments.get("position_ids"))
        if port not in matched.call.ports or any(one is not None for one in given):
            return
        expected = self._recorded(matched.call, port)
        if not is_padding_mask(port, expected):
            return
        ones, result = torch.ones_like(expected), self._result(active, port, expected)
        matched.seen.add(port)
        supplied = self._replace_padding(result, active, port, ones, expected)
        if not torch.equal(supplied, ones):
            arguments[PADDING_MASK] = supplied.to(next(active.module.parameters()).device)

    def _supply_masks(self, active: ActiveCall) -> None:
        """Check that an absent mask means the reference's, if that has one; only note it if masks are not compared."""
        matched: _Matched = active.state
        for name, value in active.arguments.items():
            port = f"input.{name}"
            if value is not None or port not in matched.call.ports:
                continue
            absent = self._find_absent_mask(matched, port)
            if absent is None:
                continue
            expected, difference = absent
            if self.attention not in COMPARABLE_IMPLEMENTATIONS:
                if difference.num_different:
                    modules = self.results.absent_masks.setdefault(name, set())
                    modules.add(active.call.site.module)
                continue
            matched.seen.add(port)
            self._result(active, port, expected).exact.add(*difference)
            self._show_own(active, port, implied_mask(expected))
            if difference.num_different:
                active.arguments[name] = mask_for(active.module, expected)

    def _find_absent_mask(
        self, matched: _Matched, port: str
    ) -> tuple[Tensor, MaskDifference] | None:
        """Compare a recorded mask with the implied one. The modules of a root call have one mask."""
        key = port, self.trace.stored(matched.call, port).digest, matched.rows
        known = self._root.absent_masks
        if key not in known:
            mask = self._recorded(matched.call, port)
            is_mask = is_attention_mask(port, mask)
            known[key] = (mask, count_differences(None, mask, matched.rows)) if is_mask else None
        return known[key]

    def _find_near_ties(self, active: ActiveCall, output: object) -> None:
        """Find the rows of a router's results to exclude because its choice is a near tie."""
        matched: _Matched = active.state
        actual = {
            port: tensor.detach().cpu()
            for port, tensor in iterate_tensors(output, "output")
            if port in matched.call.ports and tensor.ndim == 2
        }
        if not may_be_routing(actual):
            return
        expected = {port: self._recorded(matched.call, port) for port in actual}
        matched.order = find_order(actual, expected)
        choice = find_choice(actual, expected)
        if choice is None:
            return
        indices, scores = choice
        if self.score_noise is None:
            error = root_mean_square(actual[scores], expected[scores])
        else:
            error = self.score_noise.get((active.call.site.module, scores), 0.0)
        matched.scores = scores
        chosen = matched.in_order(actual[indices])
        matched.excluded = near_tie_rows(chosen, expected[indices], expected[scores], error)

    def _result(self, active: ActiveCall, port: str, value: Tensor) -> PortResult:
        results = self.recomputed if active.is_recompute else self.results
        known = results.ports.get((active.call.site.module, port))
        if known is not None:
            return known
        stage = stage_that_made(active.call, port)
        if active.is_recompute:
            stage = Stage(stage.module, "backward")
        return results.at(
            active.call.site.module,
            port,
            stage,
            str(as_real(value).dtype).removeprefix("torch."),
            "" if port.startswith("input.") else active.call.class_name,
            pointwise=stage.module in self.pointwise,
        )
