"""Programs as Python code: the text of reproduce.py."""

import difflib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from assay.recording.modules import align_names
from assay.recording.programs import Group, Program, Step, Value, numbers_in
from assay.sites import Site
from assay.statistics import Statistic
from assay.verdicts import Ratio, Verdict

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
    "error of the scale of rows": "replay-row-slope",
}

_MOST_LINES = 120
# An error in float64, where rounding makes a smaller one.
_LEAST = 1e-6
_LOWEST = {torch.finfo(one).min: one for one in (torch.float32, torch.bfloat16, torch.float16)}
# Operations that a title names.
_MOST_NAMED = 3
# Operations share lines of so many characters: the first of these with which reproduce.py is short. With the
# last, the sides share no line.
_LONGEST = (0, 120, 240, 800)
_INDENT = " " * 4
_TO_THE_END = str(2**63 - 1)


def _attend(query: str, key: str, value: str, *rest: str, **named: str) -> str:
    early = zip(("dropout_p", "is_causal"), rest, strict=False)
    options = ", ".join(map("=".join, {"enable_gqa": "True", **dict(early), **named}.items()))
    return f"F.scaled_dot_product_attention({query}, {key}, {value}, {options})"


def _attend_backward(grad: str, query: str, key: str, value: str, *rest: str, **named: str) -> str:
    forward = f"lambda q, k, v: {_attend('q', 'k', 'v', *rest, **named)}"
    return f"torch.func.vjp({forward}, {query}, {key}, {value})[1]({grad})"


# The code of operations in another form: exchanges between ranks are methods of a group (torch does not show the
# operation of a reduction: it is a sum), one takes float32 alone, and fused attention is that of every device.
_FORMS: dict[str, Callable[..., str]] = {
    "c10d.allreduce_.default": 't["group"].allreduce({0}).wait()'.format,
    "c10d.broadcast_.default": 't["group"].broadcast({0}[0], {2}).wait()'.format,
    "c10d.allgather_.default": 't["group"].allgather({0}, {1}).wait()'.format,
    "c10d._allgather_base_.default": 't["group"]._allgather_base({0}, {1}).wait()'.format,
    "aten.alias.default": "{0}".format,
    "aten._amp_foreach_non_finite_check_and_unscale_.default": "aten._foreach_mul_({0}, {2})".format,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attend,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attend_backward,
}

_RESULTS = {"right": ", the right result", "compared": ", True for each row that is compared"}
_SUBJECTS: dict[Kind, str] = {"exact": "A tensor of integers", "mask": "An attention mask"}


@dataclass(frozen=True)
class Reproduction:
    """Programs that make the value at `site`, their tensors and the right result.

    ranks, reference: numbered alike, so that equal operations on equal tensors are equal steps.
    tensors: inputs by name, "right" (float64, or what must be equal) and "compared" (its compared rows).
    recorded: the candidate's dtype. dtype: the one that reproduce.py uses by default.
    """

    site: Site
    ranks: Sequence[Program]
    """The candidate's program, or those of all ranks that exchange tensors."""
    rank: int
    """The candidate's, among them."""
    reference: Program
    names: Mapping[int, str]
    """The name of each input of all programs."""
    tensors: Mapping[str, Tensor]
    recorded: str
    dtype: str
    limits: Mapping[str, float]
    device: str
    module_class: str = ""
    """Of the module of `site`."""
    whole: "Reproduction | None" = None
    """The reproduction before it was made smaller."""

    @property
    def kind(self) -> Kind:
        """Return what is compared."""
        dtype = self.tensors["right"].dtype
        exact: Kind = "mask" if dtype is torch.bool else "exact"
        return "values" if dtype.is_floating_point else exact

    @property
    def candidate(self) -> Program:
        """The program of the wrong value."""
        return self.ranks[self.rank]

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The tensors that the programs read."""
        return {name: one for name, one in self.tensors.items() if name not in _RESULTS}

    @property
    def differing(self) -> list[Step]:
        """The operations of the candidate that the reference lacks."""
        right = set(map(says, self.reference.steps))
        return [step for step in self.candidate.steps if says(step) not in right]

    @property
    def headline(self) -> str:
        """Name what is wrong: of a few operations that differ, their names."""
        names = dict.fromkeys(step.operation.split(".")[1] for step in self.differing)
        named = ", ".join(names) if 0 < len(names) <= _MOST_NAMED else "an operation"
        subject = _SUBJECTS.get(self.kind, f"The result of {named}")
        return f"{subject} is wrong: {self.site}"

    @cached_property
    def text(self) -> str:
        """The text of reproduce.py: one operation a line, or several if there are many."""
        text, (*ranks, reference) = "", self.lines
        is_alone = len(ranks) == 1
        for longest in _LONGEST:
            fields = vars(self) | {
                "kind": self.kind,
                "headline": self.headline,
                "body": _merge(ranks[0] if is_alone else reference, reference, longest),
                "ranks": [] if is_alone else [_merge(one, one, longest) for one in ranks],
                "differs": ranks != [reference],
                "limits": repr(dict(self.limits)),
                "least": _LEAST,
            }
            text = render("program.py.j2", fields)
            if text.count("\n") < _MOST_LINES:
                break
        return text

    @cached_property
    def lines(self) -> list[list[str]]:
        """The lines of each program: of the ranks and of the reference."""
        programs = *self.ranks, self.reference
        writer = _Writer(reads(*programs), self.names, self.inputs, self.recorded)
        return [writer.write(one) for one in programs]

    def measure(self, dtype: str, device: str, program: str = "candidate") -> list[Row]:
        """Run reproduce.py's own `measure`. program: "candidate" or "reference"."""
        arguments = self.tensors, getattr(torch, dtype), device, program == "candidate"
        found: list[Row] = self._scope["measure"](*arguments)
        return found

    def run(self, program: str = "reference", dtype: str = "float64") -> Tensor:
        """Return the result of a program, on the host."""
        arguments = program == "candidate", self.inputs, getattr(torch, dtype), "cpu"
        value: Tensor = self._scope["run"](*arguments)
        return value

    @property
    def severity(self) -> float:
        """The candidate's largest error, in units of noise times limit."""
        return severity(self.measure(self.dtype, self.device))

    @cached_property
    def _scope(self) -> dict[str, Any]:
        scope: dict[str, Any] = {"__name__": "reproduce"}
        exec(compile(self.text, "reproduce.py", "exec"), scope)  # noqa: S102 - the text of this package
        return scope

    def write(self, place: str, verdict: Verdict, folder: Path) -> Path:
        """Write the folder. Returns: reproduce.py."""
        *ranks, reference = self.lines
        steps = self.candidate.steps
        stored = {k: one for k, one in self.tensors.items() if k in _RESULTS or one.ndim}
        diff = difflib.unified_diff(ranks[self.rank], reference, n=0, lineterm="")
        whole = self.whole or self
        sides = (one.measure(self.dtype, self.device) for one in (self, whole))
        fields = vars(self) | {
            "headline": self.headline,
            "template": "README.md.j2",
            "place": place,
            "operations": [*dict.fromkeys(step.operation for step in steps)],
            "changes": [f"{line[0]} {line[1:]}" for line in [*diff][2:] if line[0] in "-+"],
            "callers": [
                *dict.fromkeys(one.caller for one in self.differing or steps if one.caller)
            ],
            "stored": stored,
            "notes": _RESULTS,
            "recorded_tensors": whole.tensors,
            "rows": [(*row, error) for row, (_, error, *_) in zip(*sides, strict=False)],
            "fails_on_cpu": severity(self.measure(self.dtype, "cpu")) > 1,
            "fails_in_float64": any(row[1] > _LEAST for row in self.measure("float64", "cpu")),
        }
        return write_folder(folder, verdict, stored, self.text, fields)


def _merge(candidate: Sequence[str], reference: Sequence[str], longest: int) -> str:
    """Return the body of one function: where both sides differ, a branch for each."""
    body: list[str] = []
    spans = difflib.SequenceMatcher(None, candidate, reference, autojunk=False).get_opcodes()
    if longest == _LONGEST[-1] and candidate != reference:
        spans = [("replace", 0, len(candidate), 0, len(reference))]
    for tag, start, stop, right_start, right_stop in spans:
        own, right = candidate[start:stop], reference[right_start:right_stop]
        if tag == "equal":
            body += _join(own, _INDENT, longest)
            continue
        for head, lines in (("if wrong:", own), ("else:" if own else "if not wrong:", right)):
            if lines:
                body += [_INDENT + head, *_join(lines, 2 * _INDENT, longest)]
    return "\n".join(body)


def _join(lines: Sequence[str], indent: str, longest: int) -> list[str]:
    """Indent lines. Neighbors share a line of up to `longest` characters."""
    joined: list[str] = []
    for line in lines:
        if joined and len(joined[-1] + line) < longest:
            joined[-1] += f"; {line}"
        else:
            joined.append(indent + line)
    return joined


def severity(rows: Iterable[Row]) -> float:
    """Return the largest error, in units of noise times limit; over 1 is wrong."""
    return max(Ratio(STATISTICS.get(name, "exact"), *numbers).severity for name, *numbers in rows)


def write_folder(
    folder: Path,
    verdict: Verdict,
    tensors: Mapping[str, Tensor],
    script: str,
    fields: dict[str, Any],
) -> Path:
    """Write the script, its tensors, versions of the run that failed, and a README. Returns: reproduce.py.

    fields: of the README, its template, and the site of the wrong value.
    """
    torch.save({name: one.clone() for name, one in tensors.items()}, folder / "tensors.pt")
    facts: dict[str, Any] = {"site": str(fields["site"])}
    for part in ("environment", "reference", "candidate"):
        facts[part] = {k: v for k, v in getattr(verdict, part).items() if k not in _OF_THE_RUN}
    write_whole(folder / "environment.json", json.dumps(facts, indent=1) + "\n")
    versions = verdict.environment.get("versions", {}) | verdict.candidate.get("versions", {})
    shown = [f"{name} {versions[name]}" for name in _SHOWN if name in versions]
    there = ", ".join([verdict.candidate.get("device", "the host"), *shown])
    fields = {**fields, "there": there, "sides": describe_sides(verdict)}
    write_whole(folder / "README.md", render(fields["template"], fields))
    return write_whole(folder / "reproduce.py", script)


def render(template: str, fields: Mapping[str, Any]) -> str:
    """Render a template of this package."""
    return text_environment(_TEMPLATES).get_template(template).render(fields)


@dataclass
class _Writer:
    """Writes the bodies of functions. One value has one name in all of them."""

    used: set[int]
    """The values that an operation of any program reads, or that a program returns."""
    names: Mapping[int, str]
    tensors: Mapping[str, Tensor]
    recorded: str
    _variables: dict[int, str] = field(default_factory=dict)  # by number

    def write(self, program: Program) -> list[str]:
        """Return a line for each number that it reads, for each operation, and the last line."""
        constants = {
            f"{self._value(number)} = {self._constant(self.tensors[self.names[number]])}": None
            for number in sorted(reads(program) & self.names.keys())
            if not self.tensors[self.names[number]].ndim
        }
        lines = map(self._line, program.steps)
        return [*constants, *lines, f"return {self._value(program.target)}"]

    def _constant(self, tensor: Tensor) -> str:
        dtype = self._code(tensor.dtype)
        return f"torch.tensor({self._code(tensor.tolist())}, dtype={dtype}, device=device)"

    def _line(self, step: Step) -> str:
        code = self._call(step)
        if self.used.isdisjoint(step.results):
            return code
        for number in filter(self.used.__contains__, step.results):
            self._variables.setdefault(number, f"v{len(self._variables) + 1}")
        names = ", ".join(self._variables.get(number, "_") for number in step.results)
        return f"{names}{',' * (step.has_several and len(step.results) == 1)} = {code}"

    def _value(self, number: int) -> str:
        if number not in self.names:
            return self._variables[number]
        name = self.names[number]
        return f't["{name}"]' if self.tensors[name].ndim else re.sub(r"\W", "_", name)

    def _call(self, step: Step) -> str:
        namespace, name, *_ = step.operation.split(".")
        args = [self._code(one) for one in step.args]
        kwargs = {name: self._code(one) for name, one in step.kwargs.items()}
        if step.operation in _FORMS:
            return _FORMS[step.operation](*args, **kwargs)
        if "c10d" in namespace:
            raise RuntimeError(f"ranks exchange tensors by {step.operation}")
        if name == "slice" and args[-1] == _TO_THE_END:
            args.pop()
        called = f"aten.{name}" if namespace == "aten" else f"torch.ops.{namespace}.{name}"
        return f"{called}({', '.join([*args, *map('='.join, kwargs.items())])})"

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
            case float() if value in _LOWEST:  # fills a mask; other dtypes do not hold it
                return f"torch.finfo({self._code(_LOWEST[value])}).min"
            case float() if not math.isfinite(value):
                return f'float("{value}")'
            case list() | tuple():
                return f"[{', '.join(map(self._code, value))}]"
        return repr(value)


def number_alike(
    programs: Sequence[Program],
) -> tuple[list[Program], dict[int, str], dict[str, Tensor]]:
    """Give equal inputs, and the results of equal operations on them, the numbers that they have in the first program.

    Returns: programs, the names of inputs by number, and tensors by name; equal tensors have one name.
    """
    tensors: dict[str, Tensor] = {}
    of_names: dict[str, int] = {}
    alike: list[Program] = []
    new = itertools.count(1)
    for program in programs:
        numbers: dict[int, int] = {}
        for number, tensor in program.inputs.items():
            name = _name(tensors, tensor, program.names.get(number, "constant"))
            of_names[name] = numbers[number] = of_names.get(name) or next(new)
        first = alike[0].steps if alike else ()
        names = [[step.operation for step in steps] for steps in (program.steps, first)]
        partners, free = align_names(*names), dict(enumerate(first))
        steps: list[Step] = []
        for k, step in enumerate(program.steps):
            own = renumber(step, numbers)
            same = (n for n, one in free.items() if says(one) == says(own))
            twin = free.pop(next(same, partners.get(k, -1)), None)
            if twin and [*map(bool, twin.results)] == [*map(bool, own.results)]:
                results = twin.results
            else:
                results = [one and next(new) for one in own.results]
            numbers |= dict(zip(own.results, results, strict=True))
            steps.append(own._replace(results=results))
        alike.append(Program(steps, {}, {}, numbers[program.target]))
    return alike, {number: name for name, number in of_names.items()}, tensors


def renumber(step: Step, numbers: Mapping[int, int]) -> Step:
    """Return a step with other numbers of the values that it reads."""

    def renumbered(leaf: Any) -> Any:  # noqa: ANN401 - an argument
        return Value(numbers.get(leaf, leaf)) if isinstance(leaf, Value) else leaf

    args, kwargs = tree_map(renumbered, (step.args, step.kwargs))
    return step._replace(args=args, kwargs=kwargs)


def reads(*programs: Program) -> set[int]:
    """Return the numbers of the values that programs read or return."""
    return {
        number
        for one in programs
        for number in (one.target, *numbers_in([step[1:3] for step in one.steps]))
    }


def says(step: Step) -> tuple[str, str]:
    """Return what a step does, and to which values."""
    arguments = step.args, step.kwargs
    values = tree_map(lambda one: f"v{one}" if isinstance(one, Value) else one, arguments)
    return step.operation, str(values)


def _name(tensors: dict[str, Tensor], tensor: Tensor, wanted: str) -> str:
    for name, other in tensors.items():
        if tensor.stride() == other.stride() and same_bits(tensor, other):
            return name
    wanted = re.sub(r"[^\w.]", "_", wanted)
    numbered = (f"{wanted}_{number}" for number in itertools.count(2))
    name = next(one for one in itertools.chain([wanted], numbered) if one not in tensors)
    tensors[name] = tensor
    return name
