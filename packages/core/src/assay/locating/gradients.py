"""Gradients at module boundaries: measured, and replaced by the reference's."""

from dataclasses import dataclass, field

from torch import Tensor

from assay.comparing.results import PortResult, ReplayResults
from assay.hooks.row_positions import RowIndex
from assay.hooks.values.boundary import Boundary, laid_out_as
from assay.locating.label_gradients import LabelDifference, find_label_differences
from assay.locating.loss_scale import GradientScale, LossScale
from assay.locating.matching.packed_trace import ReplayedTrace
from assay.locating.matching.running_parts import RankLayout, layout_of
from assay.sites import Call, CallSite
from assay.stages import Stage, stage_that_made


@dataclass
class GradientReplayer:
    """A handler that measures gradients against those of `GradientRecorder`, and injects these."""

    trace: ReplayedTrace
    boundary: Boundary
    layout: RankLayout | None = None
    """The sharding of a rank's tensors; None if they are whole."""
    unmeasured: frozenset[tuple[str, str]] = frozenset()
    """Modules and ports without expected values."""
    loss_scale: LossScale | None = None
    """The factor of a trainer that scales its loss: gradients are measured without it and injected
    with it. None if a factor is an error."""
    results: ReplayResults = field(default_factory=ReplayResults)
    scales: list[GradientScale] = field(default_factory=list)
    """Scale of the first gradient of the loss in each backward pass."""
    labels: list[LabelDifference] = field(default_factory=list)
    """Wrong labels, derived from that gradient."""
    _index: RowIndex = field(default_factory=lambda: RowIndex(None))
    _expected: set[tuple[CallSite, str]] = field(default_factory=set)
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
                self.results.note_extra_port(call.site.module, f"gradient of {port}")
            return False
        shape = self.trace.stored(partner, port).shape
        known = layout_of(self.layout, partner.site.module, port, value, shape)
        if shape != tuple(value.shape) and known is None:
            self.results.note_missing_port(partner.site.module, f"gradient of {port}")
            return False
        return True

    def announce(self, call: Call, port: str) -> None:
        """Expect a gradient: one that never arrives is noted by `finish_backward`."""
        partner = self._find_partner(call)
        if partner is not None:
            self._expected.add((partner.site, port))

    def arrive(self, call: Call, port: str, gradient: Tensor) -> Tensor:
        """Measure the gradient, and return the reference's."""
        partner = self._find_partner(call)
        if partner is None:
            return gradient
        self._expected.discard((partner.site, port))
        expected = self.trace.tensor(partner, port)
        if self._index.rows != partner.rows:
            self._index = RowIndex(partner.rows)
        place, shape = (partner.site.module, port), tuple(expected.shape)
        layout = layout_of(self.layout, *place, gradient, shape)
        actual = gradient.detach()
        if layout is not None:
            actual = layout.whole_gradient(*place, actual, shape)
        actual = actual.cpu()
        (actual_RC, expected_RC), prompt, position = self._index.flatten(actual, expected)
        result = self._result(partner, port, gradient)
        self._find_scale(partner, result.stage, actual, expected)
        if partner.caller is None and port.startswith("output"):
            # Padding may hold any value, but must not contribute to the loss.
            padding, expected_padding = self._index.padding(actual, expected)
            wrong = (padding != 0).any(-1) & (expected_padding == 0).all(-1)
            result.exact.add(max(len(padding), 1), int(wrong.sum()))
        if self.loss_scale is not None:
            actual_RC = actual_RC.double() / self.loss_scale.factor
        if actual_RC.dtype.itemsize > expected.dtype.itemsize:
            actual_RC = actual_RC.to(expected.dtype)  # the yardstick, in the dtype of the trace
        result.sums.add_later(actual_RC, expected_RC, prompt, position)
        if self.loss_scale is not None and self.loss_scale.has_overflown(gradient):
            return gradient
        injected = self.boundary.injected(expected, gradient.dtype)
        if self.loss_scale is not None:
            # Not clamped: a value too large for the dtype has to overflow.
            injected = (injected.double() * self.loss_scale.factor).to(gradient.dtype)
        injected = injected.to(gradient.device)
        if layout is not None:
            injected = layout.part_of_gradient(*place, injected)
        return laid_out_as(injected, gradient)

    def micro_batches_begun(self) -> list[int]:
        """Return the micro-batches with a gradient since the last `finish_backward`."""
        return sorted({micro_batch for _, micro_batch, _ in self._begun})

    def finish_backward(self) -> None:
        """Note announced gradients that did not arrive."""
        for site, port in sorted(self._expected):
            call = self.trace.find(site)
            # No gradient is the same as a gradient of zero.
            if call is None or self.trace.tensor(call, port).any():
                self.results.note_missing_port(site.module, f"gradient of {port}")
        self._expected.clear()
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
        if self.loss_scale is not None and is_first:
            self.loss_scale.learn(found)

    def _find_partner(self, call: Call) -> Call | None:
        """Find the recorded gradients of a call."""
        if self._latest[0] is not call:
            self._latest = call, self.trace.find(call.site.backward)
        return self._latest[1]

    def _result(self, call: Call, port: str, gradient: Tensor) -> PortResult:
        stage = stage_that_made(call, port)
        dtype = str(gradient.dtype).removeprefix("torch.")
        kind = call.class_name if port.startswith("input.") else ""
        return self.results.at(call.site.module, port, stage, dtype, kind)
