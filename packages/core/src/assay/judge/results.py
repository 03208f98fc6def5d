"""The measurements of a replay, port by port: written by the process that ran, read by the judge."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from assay.kernel import WorstElement
from assay.metrics import PairSums, RowErrors
from assay.sites import CallSite
from assay.stages import Stage
from assay.trace import Trace, TraceWriter, require_fields

_NUMBERS = tuple(item.name for item in fields(PairSums) if item.type in (int, float))
_TENSORS = tuple(item.name for item in fields(PairSums) if item.type in (Tensor, Tensor | None))
_OPTIONAL = {item.name for item in fields(PairSums) if item.type == Tensor | None}
_PORT_FIELDS = (
    "module", "port", "order", "dtype", "kind", "pointwise", "num_nonfinite_padding",
)  # fmt: skip
_ROW_FIELDS = tuple(item.name for item in fields(RowErrors))
# Attributes of `ReplayResults` by their names in files.
_LISTS = {
    "replaced_by_ancestor": "uncalled_modules",
    "unmatched_expected": "unmatched_expected",
    "unmatched_actual": "unmatched_actual",
}


@dataclass(slots=True)
class ExactCount:
    """Comparison of values that are not rounded: indices, positions, masks, cache history."""

    num_compared: int = 0
    num_different: int = 0
    num_near_ties: int = 0
    first: tuple[int, int] = (-1, -1)
    """Prompt and position of the first difference."""

    def add(self, num_compared: int, num_different: int, first: tuple[int, int] = (-1, -1)) -> None:
        """Count one more comparison. first: prompt and position of its first difference, if known."""
        self.num_compared += num_compared
        self.num_different += num_different
        if self.first == (-1, -1):
            self.first = first


@dataclass(slots=True)
class PortResult:
    """The measurements at one port of one module, over all its calls."""

    module: str
    port: str
    stage: Stage
    """The stage whose code computed the values."""
    order: int
    """Number of the port, in the order of first measurements."""
    dtype: str
    """Dtype of the computed values."""
    kind: str
    """Class of the stage's module."""
    pointwise: bool = False
    """Every operation of the stage rounds element by element; none adds values up."""
    num_nonfinite_padding: int = 0
    """Number of non-finite values in padding where the reference is finite. Padding is not compared."""
    num_padding: int = 0
    """Number of rows of padding. Only the process that measured knows it, and the passes."""
    passes: list[tuple[tuple[int, int], int]] = field(default_factory=list)
    """Batch and step of each forward pass, with the number of rows of `sums`, in order."""
    first_different: tuple[int, int] | None = None
    """Batch and step of the first pass whose exact values differ."""

    sums: PairSums = field(default_factory=PairSums)
    exact: ExactCount = field(default_factory=ExactCount)
    rank: int = 0
    """Rank of the process that measured, within one candidate."""
    step: int = 0
    """Step of a training run that is measured step by step; otherwise 0."""

    @property
    def place(self) -> dict[str, Any]:
        """Return the columns that locate a row of measurements.jsonl: the stage, and the port from there."""
        own = self.module == self.stage.module
        return {
            "module": self.stage.module,
            "port": self.port if own else f"{self.module}:{self.port}",
            "phase": self.stage.phase,
            "order": self.order,
            "rank": self.rank,
        }

    def end_pass(self, at: tuple[int, int], num_rows: int = 0) -> None:
        """Note a pass that was measured, by batch and step, and its number of rows in `sums`."""
        self.passes.append((at, num_rows))
        if self.exact.num_different and self.first_different is None:
            self.first_different = at


@dataclass(slots=True)
class ReplayResults:
    """The measurements at all ports of a replay, and the names without a partner."""

    ports: dict[tuple[str, str], PortResult] = field(default_factory=dict)
    num_identical: int = 0
    """Number of values that were injected objects passed on, which are not measured again."""
    uncalled_modules: list[str] = field(default_factory=list)
    """Modules that were not called, inside a called module: its code replaces theirs."""
    unmatched_expected: list[str] = field(default_factory=list)
    """Calls and ports that only the reference has."""
    unmatched_actual: list[str] = field(default_factory=list)
    """Calls and ports that only this run has."""
    absent_masks: dict[str, set[str]] = field(default_factory=dict)
    """By argument, modules of this process that got None where the reference's mask hides more than later tokens,
    from an attention implementation whose masks are not compared."""

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
        """Return the result of a port, which the first request creates from the arguments."""
        result = self.ports.get((module, port))
        if result is None:
            sums = PairSums(pointwise=pointwise)
            order = len(self.ports)
            result = PortResult(module, port, stage, order, dtype, kind, pointwise, sums=sums)
            self.ports[module, port] = result
        return result

    def note_extra_call(self, site: CallSite) -> None:
        """Note a call of the model that the trace lacks."""
        _append_new(self.unmatched_actual, site.module or "(model)")

    def note_extra_port(self, module: str, port: str) -> None:
        """Note a tensor of the model that the trace lacks."""
        _append_new(self.unmatched_actual, f"{module or '(model)'}:{port}")

    def note_unreadable_cache(self, module: str, cache: str) -> None:
        """Note a cache whose values cannot be read. It comes first: it explains other missing ports."""
        name = f"{module or '(model)'}:changed.{cache}"
        if name not in self.unmatched_expected:
            self.unmatched_expected.insert(0, name)

    def note_missing_port(self, module: str, port: str) -> None:
        """Note a tensor of the trace that the model lacks."""
        _append_new(self.unmatched_expected, f"{module or '(model)'}:{port}")

    def note_missing_call(self, site: CallSite, *, is_inside_called: bool) -> None:
        """Note a call of the trace that the model does not make.

        is_inside_called: the model called an enclosing module.
        """
        _append_new(
            self.uncalled_modules if is_inside_called else self.unmatched_expected,
            site.module or "(model)",
        )

    def flush(self) -> None:
        """Add the small calls that are still collected."""
        for result in self.ports.values():
            result.sums.flush()

    def keep_larger_row_slopes(self, other: "ReplayResults") -> None:
        """Replace the sums of row slopes at each port where those of `other` are larger."""
        for key, result in self.ports.items():
            if key in other.ports:
                pair = result.sums, other.ports[key].sums
                result.sums.row_slopes = max(pair, key=PairSums.row_slope).row_slopes

    def to_parts(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the results as JSON values and named tensors, after a flush."""
        self.flush()
        tensors: dict[str, Tensor] = {}
        table = []
        for number, result in enumerate(self.ports.values()):
            sums = result.sums
            rows = RowErrors.concatenate(sums.rows)
            for item in _TENSORS:
                if (tensor := getattr(sums, item)) is not None:
                    tensors[f"{number}.{item}"] = tensor
            for item in _ROW_FIELDS:
                tensors[f"{number}.rows.{item}"] = getattr(rows, item)
            table.append(
                {
                    **{item: getattr(result, item) for item in _PORT_FIELDS},
                    "stage": asdict(result.stage),
                    "exact": asdict(result.exact),
                    "sums": {item: getattr(sums, item) for item in _NUMBERS},
                    "worst": asdict(sums.worst),
                }
            )
        lists = {name: getattr(self, attribute) for name, attribute in _LISTS.items()}
        return {"ports": table, "num_identical": self.num_identical, **lists}, tensors

    @classmethod
    def from_parts(cls, data: dict[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> Self:
        """Restore results from the return values of `to_parts`.

        Raises: TraceError, which names `folder`, if a sum or count is missing or unknown.
        """
        lists = {attribute: data[name] for name, attribute in _LISTS.items()}
        results = cls({}, data["num_identical"], **lists)
        tensors_of: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            port, _, item = name.partition(".")
            tensors_of.setdefault(port, {})[item] = tensor
        for number, row in enumerate(data["ports"]):
            own = tensors_of.get(str(number), {})
            place = f"{row.get('module') or '(model)'}:{row.get('port')}"
            require_fields(folder, place, _fields_of(row, own), _FIELDS)
            of_sums: dict[str, Any] = {item: own.get(item) for item in _TENSORS}
            sums = PairSums(
                pointwise=row["pointwise"],
                **row["sums"],
                **of_sums,
                rows=[RowErrors(*(own[f"rows.{item}"] for item in _ROW_FIELDS))],
                worst=WorstElement(**row["worst"] | {"index": tuple(row["worst"]["index"])}),
            )
            exact = ExactCount(**row["exact"] | {"first": tuple(row["exact"]["first"])})
            result = PortResult(
                **{item: row[item] for item in _PORT_FIELDS},
                stage=Stage(**row["stage"]), sums=sums, exact=exact,
            )  # fmt: skip
            results.ports[result.module, result.port] = result
        return results


_PARTS = {
    "stage": [item.name for item in fields(Stage)],
    "exact": [item.name for item in fields(ExactCount)],
    "worst": [item.name for item in fields(WorstElement)],
    "sums": _NUMBERS,
}
_FIELDS = (
    *_PORT_FIELDS,
    *(f"{part}.{name}" for part, names in _PARTS.items() for name in names),
    *(name for name in _TENSORS if name not in _OPTIONAL),
    *(f"rows.{name}" for name in _ROW_FIELDS),
)


def _fields_of(row: dict[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the fields of one port in the return values of `to_parts`, for `_FIELDS`."""
    yield from row.keys() - _PARTS
    for part in _PARTS:
        yield from (f"{part}.{name}" for name in row.get(part, ()))
    yield from tensors.keys() - _OPTIONAL


def _append_new(names: list[str], name: str) -> None:
    if name not in names:
        names.append(name)


def attach_results(writer: TraceWriter, name: str, results: ReplayResults) -> None:
    """Store `results` under `name`. Raises: as `TraceWriter.attach`."""
    data, sums = results.to_parts()
    writer.attach_json(name, data)
    writer.attach(_sums_of(name), sums)


def read_results(trace: Trace, name: str) -> ReplayResults:
    """Read the results that `attach_results` stored under `name`.

    Raises: as `Trace.attachment` and `ReplayResults.from_parts`.
    """
    data: Any = trace.attachment_json(name)
    return ReplayResults.from_parts(data, trace.attachment(_sums_of(name)), trace.folder)


def _sums_of(name: str) -> str:
    return f"{name}-sums"
