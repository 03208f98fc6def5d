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
# Operations share lines of so many characters: the first of these with which reproduce.py is short.
_LONGEST = (0, 90, 120, 180, 240, 400, 800)
_TO_THE_END = str(2**63 - 1)

# Keyword arguments that change no value.
_USUAL = ("pin_memory", "layout")

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
_VARIABLE, _INPUT = re.compile(r"\bv\d+\b"), re.compile(r't\["[^"]*"\]')


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
        text = ""
        for longest in _LONGEST:
            candidate, reference, *ranks = (_join(*body, longest) for body in self._bodies)
            fields = vars(self) | {
                "headline": f"{self.site} is wrong",
                "candidate": candidate,
                "reference": reference if self._bodies[1][0] != self._bodies[0][0] else None,
                "ranks": ranks,
                "limits": repr(dict(self.limits)),
            }
            text = render("program.py.j2", fields)
            if text.count("\n") < _MOST_LINES:
                break
        return text

    @cached_property
    def _bodies(self) -> list[tuple[list[str], list[int], str]]:
        """The lines of each function, the numbers of those that the other side lacks, and what marks them."""
        programs = self.candidate, self.reference, *self.ranks
        lines = [
            _Writer(one, names, self.recorded).write()
            for one, names in zip(programs, self.names, strict=True)
        ]
        candidate, reference, *ranks = lines
        return [
            (candidate, _find_unlike(candidate, reference), OTHER),
            (reference, _find_unlike(reference, candidate), RIGHT),
            *((one, _find_unlike(one, reference), OTHER) for one in ranks),
        ]

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
        steps = self.candidate.steps
        wrong = [steps[k] for k in self._bodies[0][1] if k < len(steps)] or steps
        fields = vars(self) | {
            "headline": headline,
            "operations": list(dict.fromkeys(step.operation for step in steps)),
            "marked": [line.removesuffix(OTHER) for line in lines if line.endswith(OTHER)],
            "right": [line.removesuffix(RIGHT) for line in lines if line.endswith(RIGHT)],
            "callers": list(dict.fromkeys(step.caller for step in wrong if step.caller)),
            "shapes": {name: [*tensor.shape] for name, tensor in self.tensors.items()},
            "rows": self.measure(self.dtype, self.device),
            "fails_on_cpu": severity(self.measure(self.dtype, "cpu")) > 1,
            "fails_as_recorded": severity(self.measure(self.recorded, self.device)) > 1,
        }
        return write_folder(
            folder, verdict, str(self.site), self.tensors, self.text, "README.md.j2", fields
        )


def _find_unlike(own: Sequence[str], other: Sequence[str]) -> list[int]:
    """Return the numbers of lines with an operation that the other program runs less often.

    If the operations are the same, those that run in another order or on other tensors.
    """
    known = {_VARIABLE.sub("v", line) for line in other}
    unknown = {k for k, line in enumerate(own) if _VARIABLE.sub("v", line) not in known}
    plain = [
        [_INPUT.sub("v", _VARIABLE.sub("v", line.rpartition(" = ")[2])) for line in lines]
        for lines in (own, other)
    ]
    surplus = Counter(plain[0]) - Counter(plain[1])
    of_surplus = {k for k, line in enumerate(plain[0]) if line in surplus}
    return sorted(unknown & of_surplus or of_surplus or unknown)


def _join(lines: Sequence[str], marked: Sequence[int], mark: str, longest: int) -> str:
    """Return the body of a function. Neighbors share a line of up to `longest` characters if both are marked, or none."""
    body: list[tuple[str, bool]] = []
    for number, line in enumerate(lines):
        is_marked = number in marked
        if body and body[-1][1] == is_marked and len(body[-1][0]) + len(line) < longest:
            body[-1] = f"{body[-1][0]}; {line}", is_marked
        else:
            body.append((line, is_marked))
    return "\n".join(f"    {line}{mark * is_marked}" for line, is_marked in body)


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
    _variables: dict[int, str] = field(default_factory=dict)

    @cached_property
    def _used(self) -> set[int]:
        steps = self.program.steps
        return {self.program.target, *numbers_in([(one.args, one.kwargs) for one in steps])}

    def write(self) -> list[str]:
        """Return a line for each operation, and the last line."""
        return [*map(self._line, self.program.steps), f"return {self._value(self.program.target)}"]

    def _line(self, step: Step) -> str:
        code = self._operation(step)
        results = step.results[:1] if self._is_portable(step) else step.results
        if not any(number in self._used for number in results):
            return code
        for number in filter(self._used.__contains__, results):
            self._variables[number or 0] = f"v{len(self._variables) + 1}"
        names = [self._variables.get(number or 0, "_") for number in results]
        is_tuple = step.has_several and not self._is_portable(step)
        return f"{', '.join(names)}{',' * (is_tuple and len(names) == 1)} = {code}"

    def _value(self, number: int) -> str:
        if number in self.names:
            return f't["{self.names[number]}"]'
        return self._variables[number]

    def _is_portable(self, step: Step) -> bool:
        """Return True if the other form of an operation, which has only the first result, is enough."""
        return step.operation == _OF_CPU and not any(one in self._used for one in step.results[1:])

    def _operation(self, step: Step) -> str:
        namespace, name, *_ = step.operation.split(".")
        args = [self._code(one) for one in step.args]
        if name == "slice" and args[-1] == _TO_THE_END:
            args.pop()
        kwargs = [
            f"{name}={self._code(one)}" for name, one in step.kwargs.items() if name not in _USUAL
        ]
        if step.operation in _FORMS:
            return _FORMS[step.operation].format(*args)
        if "c10d" in namespace:
            raise RuntimeError(f"ranks exchange tensors by {step.operation}")
        called = f"aten.{name}" if namespace == "aten" else f"torch.ops.{namespace}.{name}"
        if self._is_portable(step):
            called = "F.scaled_dot_product_attention"
            args[3:] = map("{}={}".format, ("enable_gqa", *_OF_CPU_ARGUMENTS), ("True", *args[3:]))
        return f"{called}({', '.join([*args, *kwargs])})"

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
            case list() | tuple():
                return f"[{', '.join(map(self._code, value))}]"
        return repr(value)


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
