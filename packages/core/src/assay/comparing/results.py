"""What a replay measured, port by port; written by the process that ran, read by the one that judges."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from torch import Tensor

from assay.blocks import WorstElement
from assay.metrics import PairSums, RowErrors
from assay.sites import CallSite
from assay.stages import Stage

_SUM_FIELDS = tuple(item.name for item in fields(PairSums) if item.type in (int, float))
_LIST_FIELDS = ("replaced_by_ancestor", "unmatched_expected", "unmatched_actual")
_ROW_FIELDS = tuple(item.name for item in fields(RowErrors))


@dataclass(slots=True)
class ExactCount:
    """Comparison of values that are not rounded: indices, positions, masks, cache history."""

    num_compared: int = 0
    num_different: int = 0
    num_near_ties: int = 0
    first: tuple[int, int] = (-1, -1)  # prompt, position

    def add(self, num_compared: int, num_different: int) -> None:
        """Count one more comparison."""
        self.num_compared += num_compared
        self.num_different += num_different


@dataclass(slots=True)
class PortResult:
    """Everything measured at one port of one module, over all its calls.

    stage: the stage whose code made these values.
    order: number of the port in the order in which ports were first measured.
    dtype: of the values as they were made.
    kind: class of the stage's module.
    pointwise: no operation of the stage adds anything up; each rounds element by element.
    num_nonfinite_padding: values in padding, which is not compared, that are not finite where the
        reference's are.
    rank: of the process that measured it, among those of one candidate.
    step: of a training run whose steps are measured one by one; else 0.
    """

    module: str
    port: str
    stage: Stage
    order: int
    dtype: str
    kind: str
    pointwise: bool = False
    num_nonfinite_padding: int = 0
    sums: PairSums = field(default_factory=PairSums)
    exact: ExactCount = field(default_factory=ExactCount)
    rank: int = 0
    step: int = 0


@dataclass(slots=True)
class ReplayResults:
    """All ports of a replay, and what found no partner.

    num_identical: values that were the very objects injected before, and so not measured again.
    replaced_by_ancestor: modules that were not called, inside of one that was and has other code.
    unmatched_expected: what only the reference has; unmatched_actual: what only this run has.
    """

    ports: dict[tuple[str, str], PortResult] = field(default_factory=dict)
    num_identical: int = 0
    replaced_by_ancestor: list[str] = field(default_factory=list)
    unmatched_expected: list[str] = field(default_factory=list)
    unmatched_actual: list[str] = field(default_factory=list)

    def at(
        self,
        module: str,
        port: str,
        stage: Stage,
        dtype: str,
        kind: str,
        *,
        pointwise: bool = False,
    ) -> PortResult:
        """The result of a port, made on the first call for it; the arguments are fields of it."""
        result = self.ports.get((module, port))
        if result is None:
            sums = PairSums(counts_misrounded=pointwise)
            order = len(self.ports)
            result = PortResult(module, port, stage, order, dtype, kind, pointwise, sums=sums)
            self.ports[module, port] = result
        return result

    def note_extra_call(self, site: CallSite) -> None:
        """The model makes a call that the trace does not have."""
        _append_new(self.unmatched_actual, site.module or "(model)")

    def note_extra_port(self, module: str, port: str) -> None:
        """The model has a tensor that the trace does not have."""
        _append_new(self.unmatched_actual, f"{module or '(model)'}:{port}")

    def note_missing_port(self, module: str, port: str) -> None:
        """The trace has a tensor that the model does not have."""
        _append_new(self.unmatched_expected, f"{module or '(model)'}:{port}")

    def note_missing_call(self, site: CallSite, *, replaced_by_ancestor: bool) -> None:
        """The trace has a call that the model does not make."""
        _append_new(
            self.replaced_by_ancestor if replaced_by_ancestor else self.unmatched_expected,
            site.module or "(model)",
        )

    def flush(self) -> None:
        """Add up what waits for more calls of its port."""
        for result in self.ports.values():
            result.sums.flush()

    def to_parts(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """As JSON values and named tensors; what waits is added up first."""
        self.flush()
        tensors: dict[str, Tensor] = {}
        table = []
        for number, result in enumerate(self.ports.values()):
            sums = result.sums
            rows = RowErrors.concatenate(sums.rows)
            tensors[f"{number}.bins"] = sums.bins
            tensors[f"{number}.row_slopes"] = sums.row_slopes
            if sums.channel is not None:
                tensors[f"{number}.channel"] = sums.channel
            for item in _ROW_FIELDS:
                tensors[f"{number}.rows.{item}"] = getattr(rows, item)
            table.append(
                {
                    "module": result.module,
                    "port": result.port,
                    "stage": asdict(result.stage),
                    "order": result.order,
                    "dtype": result.dtype,
                    "kind": result.kind,
                    "pointwise": result.pointwise,
                    "num_nonfinite_padding": result.num_nonfinite_padding,
                    "exact": asdict(result.exact),
                    "sums": {item: getattr(sums, item) for item in _SUM_FIELDS},
                    "worst": asdict(sums.worst),
                }
            )
        lists = {item: getattr(self, item) for item in _LIST_FIELDS}
        return {"ports": table, "num_identical": self.num_identical, **lists}, tensors

    @classmethod
    def from_parts(cls, data: dict[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """The results of which `to_parts` made `data` and `tensors`."""
        results = cls({}, data["num_identical"], **{item: data[item] for item in _LIST_FIELDS})
        for number, row in enumerate(data["ports"]):
            rows = RowErrors(*(tensors[f"{number}.rows.{item}"] for item in _ROW_FIELDS))
            sums = PairSums(
                **row["sums"],
                channel=tensors.get(f"{number}.channel"),
                bins=tensors[f"{number}.bins"],
                row_slopes=tensors[f"{number}.row_slopes"],
                rows=[rows],
                worst=WorstElement(**row["worst"] | {"index": tuple(row["worst"]["index"])}),
            )
            exact = ExactCount(**row["exact"] | {"first": tuple(row["exact"]["first"])})
            result = PortResult(
                row["module"], row["port"], Stage(**row["stage"]), row["order"], row["dtype"],
                row["kind"], row["pointwise"], row["num_nonfinite_padding"], sums, exact,
            )  # fmt: skip
            results.ports[result.module, result.port] = result
        return results


def _append_new(names: list[str], name: str) -> None:
    if name not in names:
        names.append(name)
