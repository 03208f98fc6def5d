"""Why a run is over a limit of its expectation: the model's files, its code, a library's rounding, or the run itself.

The yardstick of this environment follows the recorded tokens. If its values differ from those of the capture, the
model's files or its code changed, even if the run is within the limits. The code changed if a value differs that no
changed weight can reach. If the yardstick is the same, and the run agrees with the host in the same dtype, another
rounding explains a small error, provided that a version changed. Imports no torch.
"""

import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from assay.devices.run_string import parse_run
from assay.dtypes import ENVIRONMENT_ROUNDING
from assay.errors import assay_command
from assay.judge.levels import find_worst
from assay.judge.wording import describe_rounding, format_number
from assay.models.config_files import can_move_outputs, list_changes
from assay.statistics import MOST_ROUNDING
from assay.verdicts import NextStep
from assay_expectations.judging import (
    describe_worst,
    errors_of,
    is_within_limits,
    judge_by,
    judge_errors,
    judge_numbers,
    limits_of,
)
from assay_expectations.records import (
    AllSeen,
    Distributions,
    Exact,
    Expectation,
    Provenance,
    Reference,
    Seen,
    Signature,
    place_of,
    step_to_verify,
)

Answer = Literal["files", "code", "rounding", "run", "none"]

# Relative changes of the yardstick that rounding explains. float32, for models over 2 billion parameters, sums its
# rounding over all layers: 2e-6 after the four layers of the micro models. It judges 16 bits, whose noise is 1e-2.
EXACT_ROUNDING = {"float64": ENVIRONMENT_ROUNDING["float64"], "float32": 1e-3}

# Relative effects of a setup function on the yardstick that its own float32 arithmetic explains.
_SETUP_ROUNDING = 1e-5

# A module whose error in this environment is this many times the recorded one is reported. Clean runs of four
# models with other threads and attention reached 1.81.
MIN_GROWTH = 2.0


@dataclass(frozen=True, slots=True)
class Explained:
    """The answer for one expectation."""

    answer: Answer
    """files: of the model. code: of the model. rounding: explains it. run: the observed one. none: undecided."""
    sentence: str
    next_steps: Sequence[NextStep]
    module: str | None = None
    """The first module with other results, in the order in which modules end."""


def explain(
    expectation: Expectation, seen: Seen, here: AllSeen, run: str, accept: NextStep
) -> Explained | None:
    """Explain an observation over a limit, or whose yardstick moved. accept: the step that makes it the expectation.

    Returns: None for a run within the limits of which no change of files or code is known.
    """
    if seen.observed is None:
        return None
    observed = seen.observed.distributions
    is_within = is_within_limits(judge_by(expectation, observed))
    if seen.reference is None:
        options = _options_of_check(expectation, seen, here)
        check = check_command(here.model_of(expectation), run, **options)
        return None if is_within else Explained("none", "", [NextStep(_FIND, check)])
    explainer = _Explainer(expectation, seen, here, run, accept, seen.reference, observed)
    if seen.changed_modules:
        found = explainer.explain_beside_weights()
        return None if is_within and found.answer == "none" else found
    if has_moved(expectation.signature, seen.reference.yardstick, seen.reference.yardstick_dtype):
        return explainer.explain_moved()
    return None if is_within else explainer.explain_same()


def _options_of_check(expectation: Expectation, seen: Seen, here: AllSeen) -> dict[str, object]:
    """Return the options of a check that runs the recorded inputs with the setup function."""
    if seen.has_other_prompts:
        expectation = expectation.model_copy(update={"prompts": expectation.inputs})
    return {"candidate_setup": here.setup} | expectation.options_of_check(seen.file)


def has_moved(signature: Signature, yardstick: Distributions, dtype: str) -> bool:
    """Return True if a yardstick in `dtype` differs from the captured one by more than rounding."""
    return not exact_change(signature, yardstick) <= EXACT_ROUNDING[dtype]


def may_hide_setup(expectation: Expectation, seen: Seen) -> bool:
    """Return True for a run within the limits whose dtype may hide what a setup function changes."""
    if seen.observed is None or seen.reference is None or seen.stale:
        return False
    judged = judge_by(expectation, seen.observed.distributions)
    resolution = max(one.resolution for one in judged.values())
    return is_within_limits(judged) and resolution > _SETUP_ROUNDING


def describe_other_rounding(expectation: Expectation, seen: Seen, here: AllSeen) -> str:
    """Describe a run within its limits that is not bitwise the captured one, if no recorded fact differs; "" otherwise."""
    then, captures = expectation.provenance, expectation.captures
    if seen.observed is None or seen.stale or here.setup or describe_environment(expectation, here):
        return ""
    settings = seen.observed.torch_settings, here.variables
    if settings != (then.torch_settings, then.process.get("variables") or {}):
        return ""
    is_repeatable = len(captures) > 1 and all(set(one.values()) == {1.0} for one in captures)
    if not is_repeatable or seen.observed.distributions == expectation.signature.captured:
        return ""
    return (
        "the run is not bitwise the captured one, although versions, processor, threads and weights are the same, and"
        " all captures were bitwise equal: a library may have been edited so that it only rounds differently"
    )


def describe_setup_effect(expectation: Expectation, effect: Exact | str) -> str:
    """Describe what the setup function does to the exact outputs; "" if it only rounds differently."""
    where = f"{expectation.provenance.yardstick_dtype} on the host"
    dtype = expectation.key.machine.dtype
    if isinstance(effect, str):
        return f"whether {dtype} hides an error is not known, as the setup function fails in {where}: {effect}"
    if exact_change(expectation.signature, effect.yardstick) <= _SETUP_ROUNDING:
        return ""
    module, size = first_changed(expectation.exact_layers, effect.exact_layers, _SETUP_ROUNDING)
    moved = describe_worst(judge_by(expectation, effect.yardstick), "the error of the captured run")
    moves = f"moves the outputs in {where}{describe_first(module, size)}: {moved}"
    return f"the setup function {moves}. {dtype} hides this; a capture in float32 would show it"


_FIND = "to find the operation"
# Computes between and after modules, such as the masks and a scale of the logits.
OWN_FORWARD = "the model's own forward, outside its modules"


def describe_first(module: str | None, size: float) -> str:
    """Name the first module with other results, with their relative difference; "" without one."""
    return f", first in {module or OWN_FORWARD} by {format_number(size)}" if size else ""


# Without a record of config.json, as in older files.
CONFIG_OR_CODE = "config.json, of which the capture has no record, or the model's code changed"


@dataclass(frozen=True, slots=True)
class _Explainer:
    """Explains one observation over a limit."""

    expectation: Expectation
    seen: Seen
    here: AllSeen
    run: str
    accept: NextStep
    reference: Reference
    observed: Distributions

    @property
    def _agrees(self) -> bool:
        """True if the run is as close to the yardstick of this environment as the host in its dtype, or is that run."""
        host, expectation = self.reference.on_host, self.expectation
        if host is None:
            return True
        update = {"yardstick": self.reference.yardstick, "captured": host}
        signature = expectation.signature.model_copy(update=update)
        limits = limits_of(signature)
        judged = judge_numbers(signature, self.observed, expectation.key.machine.dtype, limits)
        return is_within_limits(judged)

    @property
    def _own_error(self) -> str:
        """Words for an error against the yardstick of this environment that exceeds the limits; "" without one."""
        expectation, signature = self.expectation, self.expectation.signature
        own = signature.model_copy(update={"yardstick": self.reference.yardstick})
        errors = errors_of(own, self.observed), errors_of(signature, signature.captured)
        judged = judge_errors(*errors, expectation.key.machine.dtype, expectation.limits)
        if is_within_limits(judged):
            return ""
        size = describe_worst(judged, "the error of the captured run")
        return f"; besides, by its own exact outputs, {size}"

    @property
    def _packages(self) -> str:
        return describe_environment(self.expectation, self.here)

    @property
    def _grown(self) -> tuple[str | None, str]:
        """The first module in which the run is less accurate than the captured one, and words for it."""
        grown = find_grown(self.expectation.layers, self.reference.layers)
        module = next((one.place for one in grown), None)
        return module, "" if module is None else f", first in {module or OWN_FORWARD}"

    @property
    def _settings(self) -> str:
        return "; ".join(filter(can_move_outputs, self.seen.config))

    @property
    def _code(self) -> str:
        packages = self._packages or "no version differs: the installed library was edited"
        return f"the model's code changed ({packages})"

    @property
    def _model(self) -> str:
        return self.seen.model or self.here.model_of(self.expectation)

    @property
    def _options(self) -> dict[str, object]:
        return _options_of_check(self.expectation, self.seen, self.here)

    def _find_in_run(self) -> NextStep:
        return NextStep(_FIND, check_command(self._model, self.run, **self._options))

    def _find_in_code(self) -> NextStep:
        """Return the check of the code that changed, in float32 if the run's dtype hides the change."""
        is_hidden = is_within_limits(judge_by(self.expectation, self.observed))
        run = in_float32(self.run) if is_hidden else self.run
        options = self._options | {"candidate_setup": None}
        return step_from_capture(self._model, run, sys.executable, **options)

    def _after_restoring(self, *steps: NextStep) -> list[NextStep]:
        """List steps, before them the one that restores changed files."""
        if not (self.seen.stale or self._settings):
            return [*steps]
        return [step_to_verify(self.seen.file, self.run, self.here), *steps]

    def _list_steps(self, *first: NextStep) -> list[NextStep]:
        """List steps, and last the one that accepts the run, which a patched run never is."""
        return self._after_restoring(*first, *([] if self.here.setup else [self.accept]))

    def _describe_move(self, exact: Exact) -> tuple[str | None, str]:
        """Return the first module with other results, and words for it and the change of the outputs."""
        dtype = self.reference.yardstick_dtype
        moved = exact_change(self.expectation.signature, exact.yardstick)
        words = f"the exact outputs ({dtype}) move by {format_number(moved)}"
        module, size = first_changed(
            self.expectation.exact_layers, exact.exact_layers, EXACT_ROUNDING[dtype]
        )
        words += describe_first(module, size)
        if size and not exact.exact_layers.keys() <= self.expectation.exact_layers.keys():
            words += (
                " (an earlier module may be the cause: not all inputs and results were captured)"
            )
        return module, words

    def explain_moved(self) -> Explained:
        """Explain a run whose yardstick gives other values than at the capture."""
        settings, restored, code = self._settings, self.reference.restored, self._code
        module, moved = self._describe_move(self.reference)
        if not self.expectation.config:
            versions = f" ({self._packages})" if self._packages else ""
            sentence = f"undecided: {CONFIG_OR_CODE}{versions}: {moved}"
            restore = step_to_verify(self.seen.file, self.run, self.here)
            return Explained("none", sentence, [restore, *self._list_steps(self._find_in_code())])
        answer: Answer = "code"
        if not settings:
            sentence = f"{code}: {moved}"
        elif restored is None:
            answer = "files"
            sentence = f"{settings}: {moved}; whether the model's code changed too is not known"
        elif has_moved(
            self.expectation.signature, restored.yardstick, self.reference.yardstick_dtype
        ):
            module, moved = self._describe_move(restored)
            sentence = f"{code}: with the recorded config.json, {moved}; besides, {settings}"
        else:
            answer, sentence = "files", f"{settings}: {moved}"
        if not self._agrees:
            sentence += "; besides, the run fails against a reference of this environment"
            return Explained(answer, sentence, self._after_restoring(self._find_in_run()), module)
        if self.reference.on_host is None:
            sentence += self._own_error
        else:
            sentence += "; the run agrees with a reference of this environment"
        steps = [self._find_in_code()] if answer == "code" or restored is None else []
        return Explained(answer, sentence, self._list_steps(*steps), module)

    def explain_beside_weights(self) -> Explained:
        """Explain a run of other weights: what shows in values that the weights cannot reach, and in the run itself."""
        exact = self.reference.restored if self._settings else self.reference
        layers = {} if exact is None else exact.exact_layers
        rounding = EXACT_ROUNDING[self.reference.yardstick_dtype]
        reached = self.seen.changed_modules
        module, size = first_changed(self.expectation.exact_layers, layers, rounding, reached)
        answer: Answer = "code" if size else "none"
        steps = [self._find_in_code()] if size else []
        sentence = (
            f"{self._code}: values that no changed weight reaches move{describe_first(module, size)}"
            if size
            else "whether the model's code changed too is not known with other weights"
        )
        if self._agrees:
            return Explained(answer, sentence, self._list_steps(*steps), module)
        grown, place = self._grown
        wrong = f"the run itself is wrong{place}: it disagrees with {self._host}"
        steps = self._after_restoring(*steps, self._find_in_run())
        if size:
            return Explained("code", f"{sentence}; besides, {wrong}", steps, module)
        return Explained("run", f"{wrong}; {sentence}", steps, grown)

    @property
    def _host(self) -> str:
        return "the host without the setup function" if self.here.setup else "the host"

    def explain_same(self) -> Explained:
        """Explain a run whose yardstick gives the captured values."""
        same, packages = "the exact outputs are those of the capture", self._packages
        grown, place = self._grown
        if not self._agrees:
            sentence = (
                f"the run itself is wrong{place}: {same}, and the run disagrees with {self._host}"
            )
            return Explained("run", sentence, self._after_restoring(self._find_in_run()), grown)
        # A check here would share what changed with its reference, and pass.
        find_by_old = step_from_capture(self._model, self.run, sys.executable, **self._options)
        less = f"the run is less accurate than the captured one{place}"
        worst = find_worst(judge_by(self.expectation, self.observed).values())
        if not packages or worst.severity > MOST_ROUNDING:
            why = (
                f"the error is larger than another rounding explains ({packages})"
                if packages
                else "no version differs"
            )
            sentence = (
                f"undecided: {less}, but {same}, and {why}. A library may have been edited, which a check here"
                " cannot see"
            )
            return Explained("none", sentence, [find_by_old], grown)
        host = (
            "" if self.reference.on_host is None else ", and the run agrees with a reference here"
        )
        sentence = f"{less}: {same}{host}; {describe_rounding(packages)}"
        return Explained("rounding", sentence, self._list_steps(find_by_old), grown)


def check_command(model: str, run: str, **options: object) -> str:
    """Return the command that finds the operation by a reference of the environment in which it runs."""
    return assay_command(
        "check", "generate", model, reference="cpu/float32", candidate=run, **options
    )


def step_from_capture(model: str, run: str, python: str, **options: object) -> NextStep:
    """Return the step that finds the operation by a reference of the capture's environment.

    python: the Python of the changed environment, which runs the candidate.
    """
    check = check_command(model, run, candidate_python=python, **options)
    return NextStep(
        f"{_FIND}. OLD_PYTHON is the Python of an environment with the unedited packages of the capture; it runs the"
        f" reference, and {python} the candidate",
        f"OLD_PYTHON -m assay.cli {check.removeprefix('assay ')}",
    )


def in_float32(run: str) -> str:
    """Return the RUN on the same device in float32."""
    return str(replace(parse_run(run), dtype="float32"))


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
    expected: Mapping[str, Sequence[float]],
    actual: Mapping[str, Sequence[float]],
    rounding: float,
    changed: Collection[str] = (),
) -> tuple[str | None, float]:
    """Return the first module whose yardstick has other results, and their relative difference; or None and 0.

    A module that was called with other rows is left out: another library may compute fewer logits.
    changed: modules that hold other weights. Only values before the first that these can change are compared.
    """
    if not all(one in expected for one in changed):
        return None, 0.0
    for module, (num_rows, *then) in expected.items():
        if any(module == one or module.startswith(one and f"{one}.") for one in changed):
            break
        rows_here, *now = actual.get(module, [math.nan])
        if rows_here == num_rows:
            size = math.dist(then, now) / max(math.hypot(*then), sys.float_info.min)
            if not size <= rounding:
                return place_of(module, expected), size
    return None, 0.0


@dataclass(frozen=True, slots=True)
class GrownLayer:
    """A module whose relative error grew."""

    module: str
    """Its name in `Expectation.layers`."""
    place: str
    """The module whose code makes the value."""
    before: float
    now: float


def find_grown(before: Mapping[str, float], now: Mapping[str, float]) -> Iterator[GrownLayer]:
    """Yield the modules whose error grew, in the order in which they end. NaN counts as growth."""
    for module, error in before.items():
        if module in now and not now[module] <= MIN_GROWTH * error:
            yield GrownLayer(module, place_of(module, before), error, now[module])
