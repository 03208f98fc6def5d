"""Why a run is over a limit of its expectation: the model's files, its code, a library's rounding, or the run itself.

The yardstick of this environment follows the recorded tokens. Where it gives other values than at the capture, the
model's files or its code changed. Where it gives the same, a run that agrees with the host in the same dtype only
rounds differently. Imports no torch.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from assay.dtypes import ENVIRONMENT_ROUNDING
from assay.errors import assay_command
from assay.judge.wording import format_number
from assay_expectations.judging import (
    errors_of,
    is_within_limits,
    judge_numbers,
    limits_of,
)
from assay_expectations.records import (
    AllSeen,
    Distributions,
    Expectation,
    Provenance,
    Reference,
    Seen,
    Signature,
    can_move_outputs,
    list_changes,
    place_of,
    recapture_command,
)

Answer = Literal["files", "code", "rounding", "run", "none"]

# Relative changes of the yardstick that rounding explains. float32, for models over 2 billion parameters, sums its
# rounding over all layers: 2e-6 after the four layers of the micro models. It judges 16 bits, whose noise is 1e-2.
EXACT_ROUNDING = {"float64": ENVIRONMENT_ROUNDING["float64"], "float32": 1e-3}

# A module whose error in this environment is this many times the recorded one is reported. Clean runs of four
# models with other threads and attention reached 1.81.
MIN_GROWTH = 2.0


@dataclass(frozen=True, slots=True)
class Explained:
    """The answer for one expectation."""

    answer: Answer
    """files: of the model. code: of the model. rounding: of a library. run: the observed one. none: unknown."""
    sentence: str
    next_step: str
    module: str | None = None
    """The first module with other results, in the order in which modules end."""


class _Steps(NamedTuple):
    """Commands that an answer can advise."""

    find: str
    """Finds the operation by a reference of this environment."""
    find_by_old: str
    """Finds the operation by a reference of the capture's environment."""
    find_in_old: str
    """Finds the operation in the run of the capture's environment, by a reference of this one."""
    recapture: str
    """Accepts the change; "" for a patched run, which must not become the expectation."""

    @property
    def find_or_accept(self) -> str:
        """Return the advice for an unexplained change."""
        accept = f"; if the change is meant: {self.recapture}" if self.recapture else ""
        return self.find + accept


def explain(
    expectation: Expectation, seen: Seen, here: AllSeen, run: str, output: Path | str
) -> Explained:
    """Explain an observation over a limit. output: where a recapture goes."""
    check = partial(
        assay_command,
        *("check", "generate", expectation.model),
        reference="cpu/float32",
        candidate=run,
        candidate_setup=here.setup,
    )
    steps = _Steps(
        f"to find the operation: {check()}",
        f"to find the operation, in the old environment: {check(candidate_python=sys.executable)}",
        f"to find the operation: {check_old_environment(expectation)}",
        "" if here.setup else recapture_command(expectation.model, run, output),
    )
    if seen.reference is None or seen.observed is None:
        return Explained("none", "", steps.find_or_accept)
    reference, observed = seen.reference, seen.observed.distributions
    agrees = reference.on_host is None or _agrees(expectation, reference, observed)
    moved = exact_change(expectation.signature, reference.yardstick)
    if moved <= EXACT_ROUNDING[reference.yardstick_dtype]:
        return _explain_same(expectation, reference, here, steps, agrees=agrees)
    answer, sentence, module = _explain_moved(
        expectation, seen, reference, describe_environment(expectation, here)
    )
    if not agrees:
        sentence += "; besides, the run fails against a reference of this environment"
        return Explained(answer, sentence, steps.find, module)
    if reference.on_host is not None:
        sentence += "; the run agrees with a reference of this environment"
    advice = f"if the change is meant: {steps.recapture}" if steps.recapture else steps.find
    if answer == "files":
        advice = f"restore the file; {advice}"
    if answer == "code":
        advice += f"; {steps.find_in_old}"
    return Explained(answer, sentence, advice, module)


def _explain_same(
    expectation: Expectation, reference: Reference, here: AllSeen, steps: _Steps, *, agrees: bool
) -> Explained:
    """Explain a run over a limit whose yardstick gives the captured values.

    agrees: True if the run agrees with the host in the same dtype, or is that run.
    """
    same = "the exact outputs are those of the capture"
    host = "the host without the setup function" if here.setup else "the host"
    packages = describe_environment(expectation, here)
    module = first_grown(expectation.layers, reference.layers)
    where = "" if module is None else f", first in {module or '(model)'}"
    if not agrees:
        sentence = f"the run itself is wrong{where}: {same}, and the run disagrees with {host}"
        return Explained("run", sentence, steps.find, module)
    if not packages:
        lost = f"the run is less accurate than at its capture{where}"
        sentence = f"{lost}: {same}, and no version differs"
        return Explained("none", sentence, steps.find_or_accept, module)
    sentence = f"a library rounds differently ({packages}){where}: {same}"
    if reference.on_host is not None:
        sentence += ", and the run agrees with a reference of this environment"
        advice = f"nothing to look for; recapture: {steps.recapture or steps.find}"
    else:  # nothing else here can judge it: the host is its own reference
        advice = steps.find_by_old
        if steps.recapture:
            advice = f"if this accuracy is enough: {steps.recapture}; {advice}"
    return Explained("rounding", sentence, advice, module)


def _explain_moved(
    expectation: Expectation, seen: Seen, reference: Reference, packages: str
) -> tuple[Answer, str, str | None]:
    """Return the answer for a yardstick with other values, its sentence, and the first module."""
    dtype = reference.yardstick_dtype
    moved = exact_change(expectation.signature, reference.yardstick)
    module, size = first_changed(
        expectation.exact_layers, reference.exact_layers, EXACT_ROUNDING[dtype]
    )
    first = f", first in {module or '(model)'} by {format_number(size)}" if size else ""
    changed = f"the exact outputs ({dtype}) move by {format_number(moved)}{first}"
    if config := [one for one in seen.config if can_move_outputs(one)]:
        return "files", f"{'; '.join(config)}: {changed}", module
    return "code", f"the model's code changed{packages and f' ({packages})'}: {changed}", module


def describe_environment(expectation: Expectation, here: AllSeen) -> str:
    """List the versions that changed since the capture, and the processor: "torch 2.11.0 → 2.13.0"."""
    then = expectation.provenance
    return describe_versions(
        then, then.model_copy(update={"versions": here.versions, "process": {"cpu": here.cpu}})
    )


def describe_versions(then: Provenance, now: Provenance) -> str:
    """List the versions that differ, and the processors if both are known, in one line."""
    cpus = [one.process.get("cpu") for one in (then, now)]
    old, new = ({"cpu": cpu} if all(cpus) else {} for cpu in cpus)
    return ", ".join(list_changes(then.versions | old, now.versions | new))


def exact_change(signature: Signature, yardstick: Distributions) -> float:
    """Return the largest relative difference of another yardstick; infinity for NaN."""
    errors = errors_of(signature, yardstick)
    _, *wide = errors.values()
    largest = max(wide)
    return largest if math.isfinite(largest) else math.inf


def first_changed(
    expected: Mapping[str, Sequence[float]], actual: Mapping[str, Sequence[float]], rounding: float
) -> tuple[str | None, float]:
    """Return the first module whose yardstick has other results, and their relative difference; or None and 0.

    A module that was called with other rows is left out: another library may compute fewer logits.
    """
    for module, (num_rows, *then) in expected.items():
        rows_here, *now = actual.get(module, [math.nan])
        if rows_here == num_rows:
            size = math.dist(then, now) / max(math.hypot(*then), sys.float_info.min)
            if not size <= rounding:
                return place_of(module, expected), size
    return None, 0.0


def first_grown(before: Mapping[str, float], now: Mapping[str, float]) -> str | None:
    """Return the first module whose error grew. NaN counts as growth."""
    grown = (
        place_of(module, before)
        for module, error in before.items()
        if module in now and not now[module] <= MIN_GROWTH * error
    )
    return next(grown, None)


def check_old_environment(expectation: Expectation) -> str:
    """Return the command that compares the run in the environment of the capture with a reference of this one."""
    return assay_command(
        *("check", "generate", expectation.model),
        reference="cpu/float32",
        candidate=expectation.provenance.run,
        candidate_python="OLD_PYTHON",
    )


def _agrees(expectation: Expectation, reference: Reference, observed: Distributions) -> bool:
    """Return True if the run is as close to the yardstick of this environment as the host is."""
    update = {"yardstick": reference.yardstick, "captured": reference.on_host}
    signature = expectation.signature.model_copy(update=update)
    dtype = expectation.key.machine.dtype
    return is_within_limits(judge_numbers(signature, observed, dtype, limits_of(signature)))
