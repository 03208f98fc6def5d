"""Gradients at module boundaries: measured, and replaced by the reference's.

The first gradient of a loss shows the factor by which a trainer scales it, and the labels. GradScaler multiplies
the loss by 65536 and divides the gradients before they are clipped. A loss times the number of ranks is
divided by averaging the gradients. In between, gradients are the reference's times one factor.

Shape legend: B rows, T positions, V vocabulary.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import median

import torch
from torch import Tensor

from assay.hooks.row_positions import RowIndex
from assay.hooks.tensors import laid_out_as
from assay.judge.results import ReplayResults
from assay.replay.modules import Replayer
from assay.replay.ports import layout_of
from assay.sites import Call, CallSite, Phase, RowMap
from assay.stages import LabelFault, Stage, stage_that_made

# Largest error that remains in a gradient of the right direction after scaling, relative to the change
# by the scale. One wrong element in a thousand leaves 3%.
PARALLEL = 0.02

# Rounding moves the mean of many elements by less than one unit; four units have another cause.
UNITS_OF_NOISE = 4


@dataclass(frozen=True, slots=True)
class GradientScale:
    """The length of the loss's first gradient over the reference's, in one backward pass."""

    step: int
    micro_batch: int
    slope: float
    """Slope of the error on the expected value."""
    rest: float
    """The error beyond this slope, as a relative error."""
    loss_gradient: float = 1.0
    """Gradient of the return value of `compute_loss`: the factor that its caller applied."""

    @classmethod
    def of(
        cls, site: CallSite, actual: Tensor, expected: Tensor, loss_gradient: float = 1.0
    ) -> "GradientScale":
        """Measure the scale of `actual` against `expected`, in the call at `site`."""
        a, e = actual.double(), expected.double()
        ee = float((e * e).sum())
        slope = float(((a - e) * e).sum()) / ee if ee else 0.0
        rest = float((a - (1 + slope) * e).norm()) / math.sqrt(ee) if ee else 0.0
        return cls(site.step, site.micro_batch, slope, rest, loss_gradient)

    @property
    def factor(self) -> float:
        """Return the factor on the reference's gradient."""
        return 1 + self.slope

    @property
    def length(self) -> float:
        """Return the factor if it is the only difference. Return 1 if the direction differs."""
        return self.factor if self.rest <= PARALLEL * max(1.0, self.factor) else 1.0

    def is_parallel(self, unit: float) -> bool:
        """Return True if only the length differs from the reference's. unit: unit roundoff."""
        allowed = max(PARALLEL, UNITS_OF_NOISE * unit)
        return self.factor > 0 and self.rest <= allowed * self.factor


def is_scaled_alike(scales: Sequence[GradientScale], unit: float) -> bool:
    """Return True if the micro-batches of every step share one factor, and some factor is not 1.

    scales: of all ranks.
    unit: unit roundoff of the candidate's dtype. The length of a gradient is no more accurate than its
        direction: the rounding of a fused head exceeds the unit.
    """
    if not scales or not all(one.is_parallel(unit) for one in scales):
        return False
    noise = max(UNITS_OF_NOISE * unit, *(one.rest / one.factor for one in scales))
    for _, group in groupby(sorted(scales, key=lambda one: one.step), lambda one: one.step):
        of_step = list(group)
        for values in ([one.factor for one in of_step], [one.loss_gradient for one in of_step]):
            if not min(values) > 0 or max(values) > (1 + noise) * min(values):
                return False
    return any(abs(one.slope) > noise or abs(one.loss_gradient - 1) > noise for one in scales)


@dataclass(slots=True)
class ScaledStep:
    """The scale of one step."""

    step: int
    factor: float
    """Factor on all gradients at module boundaries."""
    of_loss: float
    """Factor on the return value of `compute_loss`."""
    taken_off: Phase | None = None
    """The phase that removed the factor; None if the optimizer gets scaled gradients."""
    norm: float | None = None
    """The norm that clipping computed, over the reference's, if the gradients were scaled then."""
    left: float | None = None
    """The length of the unscaled gradients over the reference's; None if most parameters disagree."""
    averaged: Phase | None = None
    """The phase that removed the number of ranks only, by averaging; None if none did."""


@dataclass
class LossScale:
    """Finds the factor of each step in its first backward pass, and the phase that removes it."""

    unit: float | None = None
    """Unit roundoff of the candidate's dtype; None if a factor is an error: all factors stay 1."""
    num_ranks: int = 1
    """Data-parallel ranks. A loss may be multiplied by their number in addition to a scale: averaging
    over ranks removes the one, unscaling the other."""
    steps: list[ScaledStep] = field(default_factory=list)
    """The steps so far, in order."""
    of_gradients: float = 1.0
    """The current factor on `.grad`."""
    _running: ScaledStep | None = None

    def begin_step(self) -> None:
        """Forget the factor of the previous step. Called before a step runs."""
        self._running, self.of_gradients = None, 1.0

    def learn(self, found: GradientScale) -> None:
        """Take the factor from the first backward pass of a step. Called as each pass begins."""
        if self.unit is None:
            return
        if self._running is not None:
            self._running.of_loss = self._running.factor / found.loss_gradient
            return
        of_loss = 1.0
        if found.is_parallel(self.unit) and found.loss_gradient > 0:
            of_loss = _nearest_plain(found.factor / found.loss_gradient, self.unit)
        factor = of_loss * found.loss_gradient
        self._running = ScaledStep(found.step, factor, of_loss)
        self.steps.append(self._running)
        self.of_gradients = factor

    @property
    def factor(self) -> float:
        """Return the factor of the running step."""
        return 1.0 if self._running is None else self._running.factor

    @property
    def of_loss(self) -> float:
        """Return the factor on the return value of `compute_loss` in the last backward pass."""
        return 1.0 if self._running is None else self._running.of_loss

    def has_overflown(self, gradient: Tensor) -> bool:
        """Return True if a scaled gradient is not finite, so that nothing may be injected.

        The trainer has to see the overflow: it skips the step and lowers its scale.
        """
        return self.factor != 1 and not bool(gradient.isfinite().all())

    def end_phase(self, phase: Phase, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Find out if a phase removed the factor, or only the number of ranks from it.

        The remaining factor is the one that is nearest to the length of the gradients.

        pairs: each gradient after the phase, and the reference's.
        """
        if self._running is None or self.of_gradients == 1:
            return
        lengths = []
        for actual, expected in pairs:
            a, e = actual.double().cpu(), expected.double()
            if square := float((e * e).sum()):
                lengths.append(float((a * e).sum()) / square)
        # The median: in a sum, one parameter that kept the factor would outweigh all others.
        length = median(lengths) if lengths else math.nan
        if not 0 < length < math.inf:
            return
        averaged = self.of_gradients / self.num_ranks
        if self._running.averaged is None and _is_nearer(length, averaged, 1.0):
            if _is_nearer(length, averaged, self.of_gradients):
                self._running.averaged, self.of_gradients = phase, averaged
        elif not _is_nearer(length, self.of_gradients, 1.0):
            self._running.taken_off, self.of_gradients = phase, 1.0
            self._running.left = length if _most_agree(lengths) else None

    def note_norm(self, ratio: float) -> None:
        """Keep the norm that clipping computed, over the reference's."""
        if self._running is not None and self._running.taken_off is None:
            self._running.norm = ratio


def was_read_scaled(step: ScaledStep) -> bool:
    """Return True if clipping measured gradients that still had the factor."""
    return step.norm is not None and _is_nearer(step.norm, step.factor, 1.0)


def _most_agree(lengths: Sequence[float]) -> bool:
    """Return True if the middle half of `lengths` is about one number."""
    ordered = sorted(lengths)
    low, high = (ordered[part * (len(ordered) - 1) // 4] for part in (1, 3))
    return low > 0 and high <= (1 + PARALLEL) * low


def _is_nearer(value: float, to: float, than_to: float) -> bool:
    """Return True if `value` is positive, finite and nearer to one factor than to another."""
    if not 0 < value < math.inf:
        return False
    return abs(math.log(value / to)) < abs(math.log(value / than_to))


def _nearest_plain(factor: float, unit: float) -> float:
    """Round `factor` to a whole number, or the reciprocal of one, if that is within rounding.

    Such a factor is a number of ranks, micro-batches or tokens, or a power of two. Above 1 / (2 unit)
    several whole numbers are within rounding, and only a power of two is taken.
    """
    turned = factor < 1
    number = 1 / factor if turned else factor
    nearest = float(round(number))
    if nearest > 1 / (2 * unit) and math.isfinite(number):
        nearest = 2.0 ** round(math.log2(number))
    if abs(number - nearest) > unit * nearest:
        nearest = number
    return 1 / nearest if turned else nearest


_MASKED, _UNCLEAR = -1, -2

# Gradients below this share of the largest in the call may be rounding of a confident prediction.
_SMALLEST_SHARE = 0.01

# In repetitive text, some labels stay the same after a shift by one.
_ALIKE = 0.9


@dataclass(frozen=True, slots=True)
class LabelDifference:
    """Labels of one row of a micro-batch that differ from the reference's."""

    step: int
    micro_batch: int
    row: int
    fault: LabelFault
    count: int
    """Number of wrong labels."""


def find_label_differences(
    site: CallSite, actual_BTV: Tensor, expected_BTV: Tensor, rows: RowMap | None
) -> Iterator[LabelDifference]:
    """Compare the labels behind two gradients at the logits of a call.

    Other ports give an empty result. So does a gradient that is zero everywhere, not finite, or of a
    loss other than a cross entropy with one label, such as one with label smoothing.
    """
    if rows is None or expected_BTV.shape[:-1] != (rows.num_rows, rows.length):
        return
    expected_BT, actual_BT = _labels(expected_BTV), _labels(actual_BTV)
    if not bool((actual_BT >= 0).any()):
        return
    for gradient_BTV, labels_BT in ((expected_BTV, expected_BT), (actual_BTV, actual_BT)):
        num_negative_BT = (gradient_BTV < 0).sum(-1)
        if bool((num_negative_BT[labels_BT >= 0] != 1).any()):
            return
    shift = _find_shift(actual_BT, expected_BT)
    # The gradient at a position belongs to the label of the next position.
    ends = torch.full((rows.num_rows, 1), -1)
    is_padding = torch.cat([torch.tensor(rows.positions)[:, 1:], ends], 1) < 0
    unmasked = (actual_BT >= 0) & (expected_BT == _MASKED)
    both = (actual_BT >= 0) & (expected_BT >= 0)
    faults: dict[LabelFault, Tensor] = {
        "prompt": unmasked & ~is_padding,
        "padding": unmasked & is_padding,
        "masked": (actual_BT == _MASKED) & (expected_BT >= 0),
        "other": both & (actual_BT != expected_BT),
    }
    if shift is not None:
        faults = {shift: actual_BT >= 0}
    for fault, is_wrong_BT in faults.items():
        for row, count in enumerate(is_wrong_BT.sum(1).tolist()):
            if count:
                yield LabelDifference(site.step, site.micro_batch, row, fault, count)


def _labels(gradient_BTV: Tensor) -> Tensor:
    """Return the label behind the gradient of each position, (B, T)."""
    size_BT = gradient_BTV.abs().amax(-1)
    labels_BT = gradient_BTV.argmin(-1)
    labels_BT[~(size_BT > _SMALLEST_SHARE * size_BT.max())] = _UNCLEAR
    labels_BT[size_BT == 0] = _MASKED
    return labels_BT


def _find_shift(actual_BT: Tensor, expected_BT: Tensor) -> LabelFault | None:
    """Return the shift that makes most labels equal the reference's, if they differ without it."""
    if _share_alike(actual_BT, expected_BT) >= _ALIKE:
        return None
    if _share_alike(actual_BT[:, 1:], expected_BT[:, :-1]) >= _ALIKE:
        return "not-shifted"
    if _share_alike(actual_BT[:, :-1], expected_BT[:, 1:]) >= _ALIKE:
        return "shifted-twice"
    return None


def _share_alike(actual_BT: Tensor, expected_BT: Tensor) -> float:
    both = (actual_BT >= 0) & (expected_BT >= 0)
    return float((actual_BT == expected_BT)[both].double().mean()) if bool(both.any()) else 0.0


@dataclass
class GradientReplayer(Replayer):
    """A `Replayer` that measures gradients too, and injects those of the trace."""

    loss_scale: LossScale = field(default_factory=LossScale)
    """The factor of a trainer that scales its loss: gradients are measured without it and injected
    with it."""
    gradients: ReplayResults = field(default_factory=ReplayResults)
    scales: list[GradientScale] = field(default_factory=list)
    """Scale of the first gradient of the loss in each backward pass."""
    labels: list[LabelDifference] = field(default_factory=list)
    """Wrong labels, derived from that gradient."""
    _index: RowIndex = field(default_factory=lambda: RowIndex(None))
    _loss_gradient: float = 1.0
    _begun: set[tuple[int, int, str]] = field(default_factory=set)
    # The call that was asked for last, and its gradients: it has several ports, each asked for twice.
    _latest: tuple[Call | None, Call | None] = (None, None)

    def begin_backward(self, gradient: Tensor) -> None:
        """Keep the gradient of the loss itself."""
        self._loss_gradient = float(gradient)

    def expects(self, call: Call, port: str, value: Tensor) -> bool:
        """Return True if the reference has a gradient there, even if this run would not compute it."""
        if (call.site.module, port) in self.unmeasured:
            return False
        partner = self._find_partner(call)
        if partner is None or port not in partner.ports:
            if value.requires_grad and partner is not None:
                self.gradients.note_extra_port(call.site.module, f"gradient of {port}")
            return False
        shape = self.trace.stored(partner, port).shape
        known = layout_of(self.layout, partner.site.module, port, value, shape)
        if shape != tuple(value.shape) and known is None:
            self.gradients.note_missing_port(partner.site.module, f"gradient of {port}")
            return False
        return True

    def arrive(self, call: Call, port: str, gradient: Tensor) -> Tensor:
        """Measure the gradient, and return the reference's."""
        partner = self._find_partner(call)
        if partner is None:
            return gradient
        expected = self._expected(partner, port, gradient)
        if self._index.rows != partner.rows:
            self._index = RowIndex(partner.rows)
        place, shape = (partner.site.module, port), tuple(expected.shape)
        layout = layout_of(self.layout, *place, gradient, shape)
        actual = gradient.detach()
        if layout is not None:
            actual = layout.whole_gradient(*place, actual, shape)
        actual = actual.cpu()
        (actual_RC, expected_RC), prompt, position = self._index.flatten(actual, expected)
        dtype = str(gradient.dtype).removeprefix("torch.")
        kind = partner.class_name if port.startswith("input.") else ""
        result = self.gradients.at(*place, stage_that_made(partner, port), dtype, kind)
        self._find_scale(partner, result.stage, actual, expected)
        if partner.caller is None and port.startswith("output"):
            # Padding may hold any value, but must not contribute to the loss.
            padding, expected_padding = self._index.padding(actual, expected)
            wrong = (padding != 0).any(-1) & (expected_padding == 0).all(-1)
            result.exact.add(max(len(padding), 1), int(wrong.sum()))
        scale = self.loss_scale.factor
        if scale != 1:
            actual_RC = actual_RC.double() / scale
        if actual_RC.dtype.itemsize > expected.dtype.itemsize:
            actual_RC = actual_RC.to(expected.dtype)  # the yardstick, in the dtype of the trace
        result.sums.add_later(actual_RC, expected_RC, prompt, position)
        if self.loss_scale.has_overflown(gradient):
            return gradient
        injected = self.boundary.injected(expected, gradient.dtype)
        if scale != 1:
            # Not clamped: a value too large for the dtype has to overflow.
            injected = (injected.double() * scale).to(gradient.dtype)
        injected = injected.to(gradient.device)
        if layout is not None:
            injected = layout.part_of_gradient(*place, injected)
        injected = laid_out_as(injected, gradient)
        return self.show_injected(partner.site, f"gradient of {port}", injected)

    def _expected(self, partner: Call, port: str, gradient: Tensor) -> Tensor:
        """Return the recorded gradient, and let the observer see it with the model's."""
        expected = self.trace.tensor(partner, port)
        if self.observer is not None:
            self.observer.measure(partner.site, port, gradient, expected)
        return expected

    def micro_batches_begun(self) -> list[int]:
        """Return the micro-batches with a gradient since the last `finish_backward`."""
        return sorted({micro_batch for _, micro_batch, _ in self._begun})

    def finish_backward(self, missing: list[tuple[CallSite, str]]) -> None:
        """Note the gradients that did not arrive."""
        for site, port in missing:
            call = self.trace.find(site.backward)
            # No gradient is the same as a gradient of zero.
            if call is None or self.trace.tensor(call, port).any():
                self.gradients.note_missing_port(site.module, f"gradient of {port}")
        self._begun.clear()
        self._loss_gradient = 1.0

    def _find_scale(self, call: Call, stage: Stage, actual: Tensor, expected: Tensor) -> None:
        """Keep the scale of the first gradient of a micro-batch; later ones arrive after it."""
        site = call.site
        key = site.step, site.micro_batch, stage.module
        is_first = all(begun[:2] != key[:2] for begun in self._begun)
        if key in self._begun or (stage.module and not is_first):
            return
        self._begun.add(key)
        (actual_RC, expected_RC), *_ = self._index.flatten(actual, expected)
        found = GradientScale.of(site, actual_RC, expected_RC, self._loss_gradient)
        if not stage.module:  # others come from a pipeline stage or a second loss
            self.scales.append(found)
            self.labels += find_label_differences(site, actual, expected, call.rows)
        if is_first:
            self.loss_scale.learn(found)

    def _find_partner(self, call: Call) -> Call | None:
        """Find the recorded gradients of a call."""
        if self._latest[0] is not call:
            self._latest = call, self.trace.find(call.site.backward)
        return self._latest[1]
