"""Programs as Python code: the text of reproduce.py."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from assay.files import write_whole
from assay.judge.wording import describe_sides
from assay.models.stored_tensors import same_bits
from assay.output.pages import text_environment
from assay.recording.programs import Group, Program, Step, Value, numbers_in
from assay.sites import Site
from assay.statistics import Statistic
from assay.verdicts import Verdict

Kind = Literal["values", "exact", "mask"]
Row = tuple[str, float, float, float]
"""Statistic, error, noise and limit."""

_TEMPLATES = Path(__file__).parent / "templates"
_SHOWN = ("torch", "transformers", "python", "system")
# What a candidate is, as far as the folder does not need it: where the user's code is.
_OF_THE_RUN = {"command", "git", "setup", "trainer"}

# The statistics of reproduce.py, and whose limits they have.
STATISTICS: dict[str, Statistic] = {
    "relative error": "replay-tensor",
    "error of the worst row": "replay-row",
    "error of the scale": "replay-slope",
}

_MOST_LINES = 120
# A longer expression gets a line of its own: the first of these with which reproduce.py is short.
_LONGEST = (60, 90, 120, 180, 240, 400)
_TO_THE_END = str(2**63 - 1)

# Keyword arguments that change nothing.
_USUAL: tuple[tuple[str, object], ...] = (
    ("pin_memory", False),
    ("layout", torch.strided),
    ("memory_format", torch.preserve_format),
)

# Operations in another form: exchanges between ranks as methods of a group (torch does not show the operation of a
# reduction: it is a sum), and one that takes float32 alone.
_FORMS = {
    "c10d.allreduce_.default": 't["group"].allreduce({0}).wait()',
    "c10d.broadcast_.default": 't["group"].broadcast({0}[0], {2}).wait()',
    "c10d.allgather_.default": 't["group"].allgather({0}, {1}).wait()',
    "c10d._allgather_base_.default": 't["group"]._allgather_base({0}, {1}).wait()',
    "aten._amp_foreach_non_finite_check_and_unscale_.default": "aten._foreach_mul_({0}, {2})",
}
# An operation of one device, which F.scaled_dot_product_attention runs on every device, and its later arguments.
_OF_CPU = "aten._scaled_dot_product_flash_attention_for_cpu.default"
_OF_CPU_ARGUMENTS = ("dropout_p", "is_causal")

OTHER = "  # not so in the reference"
RIGHT = "  # not so in the candidate"
# Ends an operation that the other program runs less often.
_MARK = "\0"


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
    device: str
    ranks: Sequence[Program] = ()
    """The programs of the ranks that exchange tensors; empty if the candidate runs alone."""
    rank: int = 0
    """The candidate's, among them."""
    module_class: str = ""
    """Of the module of `site`."""
    whole: Mapping[str, list[int]] = field(default_factory=dict)
    """Shapes of the recorded tensors, before they were made smaller."""

    @cached_property
    def text(self) -> str:
        """The text of reproduce.py: one operation a line, or several if there are many."""
        for text in map(self._write, _LONGEST):
            if text.count("\n") < _MOST_LINES:
                break
        return text

    def _write(self, longest: int) -> str:
        programs = (self.candidate, self.reference, *self.ranks)
        others = (self.reference, self.candidate, *(self.reference for _ in self.ranks))
        candidate, reference, *ranks = (
            _Writer(one, names, self.recorded, longest, _surplus(one, other)).write()
            for one, other, names in zip(programs, others, self.names, strict=True)
        )
        fields = vars(self) | {
            "headline": f"{self.site} is wrong",
            "candidate": _mark(candidate, reference, OTHER),
            "reference": _mark(reference, candidate, RIGHT) if reference != candidate else None,
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

    @property
    def severity(self) -> float:
        """The candidate's largest error, in units of noise times limit."""
        return severity(self.measure(self.dtype, self.device))

    @cached_property
    def _scope(self) -> dict[str, Any]:
        scope: dict[str, Any] = {"__name__": "reproduce"}
        exec(compile(self.text, "reproduce.py", "exec"), scope)  # noqa: S102 - the text of this package
        return scope

    def write(self, headline: str, verdict: Verdict, folder: Path) -> Path:
        """Write the folder. Returns: reproduce.py."""
        lines = [line.strip() for line in self.text.splitlines()]
        steps, surplus = self.candidate.steps, _surplus(self.candidate, self.reference)
        wrong = [step for step in steps if _describe(step) in surplus] or steps
        shapes = {name: [*tensor.shape] for name, tensor in self.tensors.items()}
        fields = vars(self) | {
            "headline": headline,
            "operations": list(dict.fromkeys(step.operation for step in steps)),
            "marked": [line.removesuffix(OTHER) for line in lines if line.endswith(OTHER)],
            "right": [line.removesuffix(RIGHT) for line in lines if line.endswith(RIGHT)],
            "callers": list(dict.fromkeys(step.caller for step in wrong if step.caller)),
            "shapes": [
                (name, self.whole.get(name, shape), shape) for name, shape in shapes.items()
            ],
            "rows": self.measure(self.dtype, self.device),
            "fails_on_cpu": severity(self.measure(self.dtype, "cpu")) > 1,
            "fails_as_recorded": severity(self.measure(self.recorded, self.device)) > 1,
        }
        return write_folder(
            folder, verdict, str(self.site), self.tensors, self.text, "README.md.j2", fields
        )


def _describe(step: Step) -> str:
    """Describe an operation and its arguments, whatever its tensors are."""
    plain = tree_map(
        lambda leaf: "v" if isinstance(leaf, Value) else leaf, [step.args, step.kwargs]
    )
    return f"{step.operation}{plain}"


def _surplus(program: Program, other: Program) -> Counter[str]:
    return Counter(map(_describe, program.steps)) - Counter(map(_describe, other.steps))


def _mark(code: str, other: str, mark: str) -> str:
    """Mark the lines with an operation that the other code runs less often.

    If the operations are the same, mark the lines that run them in another order or on other tensors.
    """
    known = {_without_numbers(line) for line in other.splitlines()}
    unknown = [line for line in code.splitlines() if _without_numbers(line) not in known]
    marked = [line for line in unknown if _MARK in line] or unknown
    lines = (line + mark if line in marked else line for line in code.splitlines())
    return "\n".join(lines).replace(_MARK, "")


def _without_numbers(line: str) -> str:
    return re.sub(r"\bv\d+\b", "v", line.replace(_MARK, ""))


def severity(rows: Iterable[Row]) -> float:
    """Return the largest error, in units of noise times limit; over 1 is wrong."""

    def over(error: float, allowed: float) -> float:
        if error == 0:
            return 0.0
        return error / allowed if math.isfinite(error) and allowed > 0 else math.inf

    return max(over(error, noise * limit) for _, error, noise, limit in rows)


def write_folder(
    folder: Path,
    verdict: Verdict,
    place: str,
    tensors: Mapping[str, Tensor],
    script: str,
    readme: str,
    fields: Mapping[str, Any],
) -> Path:
    """Write the script, its tensors, versions of the run that failed, and a README. Returns: reproduce.py."""
    torch.save({name: one.clone() for name, one in tensors.items()}, folder / "tensors.pt")
    facts: dict[str, Any] = {"site": place}
    for part in ("environment", "reference", "candidate"):
        facts[part] = {k: v for k, v in getattr(verdict, part).items() if k not in _OF_THE_RUN}
    write_whole(folder / "environment.json", json.dumps(facts, indent=1) + "\n")
    versions = verdict.environment.get("versions", {}) | verdict.candidate.get("versions", {})
    shown = [f"{name} {versions[name]}" for name in _SHOWN if name in versions]
    there = ", ".join([verdict.candidate.get("device", "the host"), *shown])
    told = {"there": there, "sides": describe_sides(verdict)}
    write_whole(folder / "README.md", render(readme, {**fields, **told}))
    return write_whole(folder / "reproduce.py", script)


def render(template: str, fields: Mapping[str, Any]) -> str:
    """Render a template of this package."""
    return text_environment(_TEMPLATES).get_template(template).render(fields)


@dataclass
class _Writer:
    """Writes the body of a function."""

    program: Program
    names: Mapping[int, str]
    recorded: str
    longest: int
    surplus: Counter[str]
    """Operations that the other program runs less often."""
    _expressions: dict[int, str] = field(default_factory=dict)
    _uses: Counter[int] = field(default_factory=Counter)
    _count: int = 0

    def write(self) -> str:
        """Return the lines. A value that is used once is written where it is used."""
        steps, target = self.program.steps, self.program.target
        self._uses.update(
            number for step in steps for number in numbers_in((step.args, step.kwargs))
        )
        self._uses[target] += 2
        lines: list[str] = []
        pending: list[int] = []
        for step in steps:
            code, read = self._operation(step), numbers_in((step.args, step.kwargs))
            pending = [number for number in pending if number not in read]
            if _changes_memory(step):  # what was made before is computed before
                lines += [self._assign([number], self._expressions[number]) for number in pending]
                pending = []
            results = [number if number and self._uses[number] else None for number in step.results]
            if self._is_portable(step):
                results = results[:1]
            is_alone = (len(results) == 1 and not step.has_several) or self._is_portable(step)
            if is_alone and self._uses[results[0] or 0] == 1 and len(code) < self.longest:
                self._expressions[results[0] or 0] = code
                pending.append(results[0] or 0)
            else:
                lines.append(
                    self._assign(results, code, "," * (len(results) == 1 and not is_alone))
                )
        return "\n".join([*lines, f"    return {self._value(target)}"])

    def _assign(self, results: Sequence[int | None], code: str, comma: str = "") -> str:
        if not any(results):
            return f"    {code}"
        return f"    {', '.join('_' if one is None else self._new(one) for one in results)}{comma} = {code}"

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
        return step.operation == _OF_CPU and not any(
            self._uses[one or 0] for one in step.results[1:]
        )

    def _operation(self, step: Step) -> str:
        namespace, name, *_ = step.operation.split(".")
        args = [self._code(one) for one in step.args]
        if name == "slice" and args[-1] == _TO_THE_END:
            args.pop()
        kwargs = [
            f"{name}={self._code(one)}"
            for name, one in step.kwargs.items()
            if (name, one) not in _USUAL
        ]
        if step.operation in _FORMS:
            code = _FORMS[step.operation].format(*args)
        elif "c10d" in namespace:
            raise RuntimeError(f"ranks exchange tensors by {step.operation}")
        elif self._is_portable(step):
            named = map("{}={}".format, ("enable_gqa", *_OF_CPU_ARGUMENTS), ("True", *args[3:]))
            code = f"F.scaled_dot_product_attention({', '.join([*args[:3], *named, *kwargs])})"
        else:
            called = "aten" if namespace == "aten" else f"torch.ops.{namespace}"
            code = f"{called}.{name}({', '.join([*args, *kwargs])})"
        return code + _MARK if _describe(step) in self.surplus else code

    def _code(self, value: Any) -> str:  # noqa: ANN401, PLR0911 - an argument of torch
        match value:
            case Value():
                return self._value(value)
            case Group():
                return 't["group"]'
            case torch.dtype():
                names = {"torch.float32": "upcast", f"torch.{self.recorded}": "dtype"}
                return names.get(str(value), str(value))
            case torch.device():
                return "device"
            case float() if not math.isfinite(value):
                return f'float("{value}")'
            case type():
                raise RuntimeError(f"an operation takes a {value.__name__}")
            case list() | tuple():
                return f"[{', '.join(map(self._code, value))}]"
        return repr(value)


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
