"""Programs as Python code: the text of reproduce.py."""

import ast
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from textwrap import dedent
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from assay.files import write_whole
from assay.models.stored_tensors import same_bits
from assay.output.pages import text_environment
from assay.recording.programs import TORCH, VALUE, Program, Step, numbers_in
from assay.sites import Site
from assay.statistics import Statistic
from assay.verdicts import Verdict

Kind = Literal["values", "exact", "mask"]
Row = tuple[str, float, float, float]
"""Statistic, error, noise and limit."""

_TEMPLATES = Path(__file__).parent / "templates"
_SHOWN = ("torch", "transformers", "python", "system")

# The statistics of reproduce.py, and whose limits they have.
STATISTICS: dict[str, Statistic] = {
    "relative error": "replay-tensor",
    "error of the worst row": "replay-row",
    "error of the scale": "replay-slope",
}

_MOST_LINES = 140
# A longer expression gets a line of its own: the first of these with which reproduce.py is short.
_LONGEST = (60, 90, 120, 180, 240)
_TO_THE_END = str(2**63 - 1)

# Keyword arguments that change nothing.
_USUAL: tuple[tuple[str, Any], ...] = (
    ("pin_memory", False),
    ("layout", {TORCH: "strided"}),
    ("memory_format", {TORCH: "preserve_format"}),
)

# Without a graph their result is their argument.
_SAME_TENSOR = frozenset({"aten.detach.default", "aten.alias.default", "aten.lift_fresh.default"})

# Operations in another form: exchanges between ranks as methods of a group (torch does not show the operation of a
# reduction: it is a sum), and one that takes float32 alone.
_FORMS = {
    "c10d.allreduce_.default": 't["group"].allreduce({0}).wait()',
    "c10d.broadcast_.default": 't["group"].broadcast({0}[0], {2}).wait()',
    "c10d.allgather_.default": 't["group"].allgather({0}, {1}).wait()',
    "c10d._allgather_base_.default": 't["group"]._allgather_base({0}, {1}).wait()',
    "aten._amp_foreach_non_finite_check_and_unscale_.default": "aten._foreach_mul_({0}, {2})",
}

# Names of operations that differ in autograd alone.
_PLAIN = {"_unsafe_view": "view"}

OTHER = "  # not so in the reference"
RIGHT = "  # not so in the candidate"

# Operations of one device, with the function that has their first result on every device, and its keywords.
_PORTABLE = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": (
        "F.scaled_dot_product_attention", ("dropout_p", "is_causal"),
    ),
}  # fmt: skip


def _mark(code: str, other: str, mark: str) -> str:
    """Mark the lines with an operation that the other code runs less often, whatever its tensors are.

    If the operations are the same, mark the lines that run them in another order or on other tensors.
    """
    more = Counter(_list_operations(code)) - Counter(_list_operations(other))
    known = {_without_numbers(line) for line in other.splitlines()}
    unknown = [line for line in code.splitlines() if _without_numbers(line) not in known]
    marked = [
        one for one in unknown if not more.keys().isdisjoint(_list_operations(one))
    ] or unknown
    return "\n".join(line + mark if line in marked else line for line in code.splitlines())


def _without_numbers(line: str) -> str:
    return re.sub(r"\bv\d+\b", "v", line)


def _list_operations(code: str) -> list[str]:
    """Return every operation with its arguments, but for those that are tensors."""
    calls = (node for node in ast.walk(ast.parse(dedent(code))) if isinstance(node, ast.Call))
    return [
        f"{call.func.attr}({', '.join(map(_argument, call.args))}, {[*map(_keyword, call.keywords)]})"
        for call in calls
        if isinstance(call.func, ast.Attribute)
    ]


def _keyword(keyword: ast.keyword) -> str:
    return f"{keyword.arg}={_argument(keyword.value)}"


def _argument(node: ast.expr) -> str:
    if isinstance(node, ast.List):
        return f"[{', '.join(map(_argument, node.elts))}]"
    is_result = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return (
        "v" if is_result or isinstance(node, ast.Subscript) else _without_numbers(ast.unparse(node))
    )


class Words(NamedTuple):
    """Words for the head of reproduce.py and its README."""

    headline: str
    story: str
    device: str


@dataclass(frozen=True)
class Reproduction:
    """Two programs that make the value at `site`, their tensors and the right result.

    tensors: inputs by name, "answer" (float64, or what must be equal) and "kept" (its compared rows).
    recorded: the candidate's dtype. dtype: the one that reproduce.py uses by default.
    """

    site: Site
    candidate: Program
    reference: Program
    names: Sequence[Mapping[int, str]]
    """The name of each input of both programs, and of those of `ranks`."""
    tensors: Mapping[str, Tensor]
    kind: Kind
    recorded: str
    dtype: str
    limits: Mapping[str, float]
    words: Words
    ranks: Sequence[Program] = ()
    """The programs of the ranks that exchange tensors; empty if the candidate runs alone."""
    rank: int = 0
    """The candidate's, among them."""

    @cached_property
    def text(self) -> str:
        """The text of reproduce.py: one operation a line, or several if there are many."""
        for text in map(self._write, _LONGEST):
            if text.count("\n") < _MOST_LINES:
                break
        return text

    def _write(self, longest: int) -> str:
        programs = zip((self.candidate, self.reference, *self.ranks), self.names, strict=True)
        candidate, reference, *ranks = (
            _Writer(program, names, self.recorded, longest).write() for program, names in programs
        )
        fields = vars(self) | self.words._asdict() | {
            "candidate": _mark(candidate, reference, OTHER),
            "reference": None if reference == candidate else _mark(reference, candidate, RIGHT),
            "ranks": [_mark(one, reference, OTHER) for one in ranks],
            "limits": repr(dict(self.limits)),
        }  # fmt: skip
        return render("program.py.j2", fields)

    def measure(self, dtype: str, device: str, program: str = "candidate") -> list[Row]:
        """Run reproduce.py's own `measure`. program: "candidate" or "reference"."""
        scope = self._scope
        function = scope[program]
        found: list[Row] = scope["measure"](self.tensors, getattr(torch, dtype), device, function)
        return found

    def run_wide(self, program: str = "reference") -> Tensor:
        """Return the result of a program in float64, on the host."""
        inputs = {name: one for name, one in self.tensors.items() if name not in ("answer", "kept")}
        value: Tensor = self._scope["run"](self._scope[program], inputs, torch.float64, "cpu")
        return value

    @property
    def has_one_shape(self) -> bool:
        """Return True if both programs make values of one shape; masks are broadcast, rows packed."""
        return self.kind != "values" or self.run_wide("candidate").shape == self.run_wide().shape

    @cached_property
    def _scope(self) -> dict[str, Any]:
        scope: dict[str, Any] = {"__name__": "reproduce"}
        exec(compile(self.text, "reproduce.py", "exec"), scope)  # noqa: S102 - the text of this package
        return scope


def write_folder(
    folder: Path,
    verdict: Verdict,
    place: str,
    tensors: Mapping[str, Tensor],
    script: str,
    readme: str,
) -> Path:
    """Write the four files: tensors, versions of the run that failed, and both texts. Returns: reproduce.py."""
    torch.save({name: one.clone() for name, one in tensors.items()}, folder / "tensors.pt")
    facts = verdict.model_dump(include={"command", "environment", "reference", "candidate"})
    write_whole(folder / "environment.json", json.dumps({"site": place} | facts, indent=1) + "\n")
    write_whole(folder / "README.md", readme)
    return write_whole(folder / "reproduce.py", script)


def render(template: str, fields: Mapping[str, Any]) -> str:
    """Render a template of this package."""
    return text_environment(_TEMPLATES).get_template(template).render(fields)


def describe_machine(verdict: Verdict) -> str:
    """Name the candidate's device and versions."""
    versions = verdict.environment.get("versions", {}) | verdict.candidate.get("versions", {})
    shown = [f"{name} {versions[name]}" for name in _SHOWN if name in versions]
    return ", ".join([verdict.candidate.get("device", "the host"), *shown])


def severity(rows: Iterable[Row]) -> float:
    """Return the largest error, in units of noise times limit; over 1 is wrong."""

    def over(error: float, allowed: float) -> float:
        if error == 0:
            return 0.0
        return error / allowed if math.isfinite(error) and allowed > 0 else math.inf

    return max(over(error, noise * limit) for _, error, noise, limit in rows)


@dataclass
class _Writer:
    """Writes the body of a function."""

    program: Program
    names: Mapping[int, str]
    recorded: str
    longest: int
    _expressions: dict[int, str] = field(default_factory=dict)
    _uses: Counter[int] = field(default_factory=Counter)
    _count: int = 0

    def write(self) -> str:
        """Return the lines. A value that is used once is written where it is used."""
        steps, target = self.program.steps, self.program.target
        uses = self._uses
        uses.update(number for step in steps for number in numbers_in((step.args, step.kwargs)))
        uses[target] += 2
        # A value may be computed later than the model did, but not after a change of memory.
        changes = [0, *accumulate(map(_changes_memory, steps))]
        used = {
            number: changes[k]
            for k, step in enumerate(steps)
            for number in numbers_in((step.args, step.kwargs))
        }
        for step in reversed(steps):
            if step.operation in _SAME_TENSOR and (same := step.results[0]) is not None:
                made = step.args[0][VALUE]
                uses[made] += uses[same] - 1
                used[made] = max(used[made], used.get(same, 0))
        lines = []
        for k, step in enumerate(steps):
            if step.operation in _SAME_TENSOR and step.results[0] is not None:
                self._expressions[step.results[0]] = self._value(step.args[0][VALUE])
                continue
            code, has_several = self._operation(step), step.has_several
            results = [number if number and uses[number] else None for number in step.results]
            if self._is_portable(step):
                results, has_several = results[:1], False
            made = [number for number in results if number is not None]
            if (
                made
                and not has_several
                and not _changes_memory(step)
                and uses[made[0]] == 1
                and used[made[0]] == changes[k]
                and len(code) < self.longest
            ):
                self._expressions[made[0]] = code
                continue
            to = ", ".join("_" if one is None else self._new(one) for one in results)
            to += "," * (has_several and len(results) == 1)
            lines.append(f"    {to} = {code}" if made else f"    {code}")
        return "\n".join([*lines, f"    return {self._value(target)}"])

    def _new(self, number: int) -> str:
        self._count += 1
        self._expressions[number] = name = f"v{self._count}"
        return name

    def _value(self, number: int) -> str:
        if number in self.names:
            return f't["{self.names[number]}"]'
        return self._expressions[number]

    def _is_portable(self, step: Step) -> bool:
        """Return True if the other form of an operation, which has only the first result, is enough."""
        return step.operation in _PORTABLE and not any(
            self._uses[one or 0] for one in step.results[1:]
        )

    def _operation(self, step: Step) -> str:
        namespace, name, *_ = step.operation.split(".")
        if step.operation in _FORMS:
            return _FORMS[step.operation].format(*map(self._code, step.args))
        if "c10d" in namespace:
            raise RuntimeError(f"ranks exchange tensors by {step.operation}")
        args = [self._code(one) for one in step.args]
        if name == "slice" and args[-1] == _TO_THE_END:
            args.pop()
        name = _PLAIN.get(name, name)
        called = f"aten.{name}" if namespace == "aten" else f"torch.ops.{namespace}.{name}"
        if self._is_portable(step):
            called, keywords = _PORTABLE[step.operation]
            args = [*args[:3], "enable_gqa=True", *map("{}={}".format, keywords, args[3:])]
        kwargs = [item for item in step.kwargs.items() if item not in _USUAL]
        args += [f"{name}={self._code(one)}" for name, one in kwargs]
        return f"{called}({', '.join(args)})"

    def _code(self, value: Any) -> str:  # noqa: ANN401 - JSON
        match value:
            case {"value": number}:
                code = self._value(number)
            case {"dtype": self.recorded}:
                code = "dtype"
            case {"dtype": "float32"}:
                code = "upcast"
            case {"dtype": name} | {"torch": name}:
                code = f"torch.{name}"
            case {"device": _}:
                code = "device"
            case {"number": text}:
                code = f'float("{text}")'
            case {"group": _}:
                code = 't["group"]'
            case {"unknown": kind}:
                raise RuntimeError(f"an operation takes a {kind}")
            case list():
                code = f"[{', '.join(map(self._code, value))}]"
            case _:
                code = repr(value)
        return code


def _changes_memory(step: Step) -> bool:
    _, name, *overload = step.operation.split(".")
    return name.endswith("_") or "out" in overload


def name_inputs(
    programs: Iterable[Program],
) -> tuple[list[dict[int, str]], dict[str, Tensor]]:
    """Name the inputs of all programs; equal tensors have one name. Returns: names, tensors by name."""
    tensors: dict[str, Tensor] = {}
    names: list[dict[int, str]] = []
    for program in programs:
        names.append({})
        for number, tensor in program.inputs.items():
            names[-1][number] = _name(tensors, tensor, program.names.get(number, "constant"))
    return names, tensors


def _name(tensors: dict[str, Tensor], tensor: Tensor, wanted: str) -> str:
    for name, other in tensors.items():
        if tensor.stride() == other.stride() and same_bits(tensor, other):
            return name
    wanted = re.sub(r"[^\w.]", "_", wanted)
    count = sum(name == wanted or name.startswith(f"{wanted}:") for name in tensors)
    name = f"{wanted}:{count + 1}" if count else wanted
    tensors[name] = tensor
    return name
