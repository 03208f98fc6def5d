"""Words of messages, tables and pictures: numbers, phrases, and the meaning of each diagnosis."""

import difflib
import math
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from assay.errors import UsageError
from assay.files import read_toml
from assay.foreign_text import one_line
from assay.sites import Phase
from assay.statistics import MOST_ROUNDING, STATISTICS
from assay.verdicts import Location, Measurement, Outcome, Record, Verdict

# Three significant digits: errors and ratios of two runs rarely repeat more of them.
DIGITS = 3
_SMALLEST_PLAIN = 0.1
_LARGEST_PLAIN = 1e9
_MOST_DIGITS = 17  # enough to tell any two float64 values apart


def format_number(value: float, digits: int = DIGITS) -> str:
    """Format `value` with few digits.

    >>> [format_number(v) for v in (0.041, 14.62, 3.0, 518.4, 1.23e6, 1e9, 0.0)]
    ['4.1e-2', '14.6', '3.0', '518', '1,230,000', '1e9', '0']
    """
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    rounded = float(f"{mantissa}e{exponent}")
    if abs(rounded) < _SMALLEST_PLAIN or abs(rounded) >= _LARGEST_PLAIN:
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    decimals = max(0, digits - 1 - int(exponent))
    plain = f"{rounded:,.{decimals}f}"
    if not decimals:
        return plain
    plain = plain.rstrip("0")
    return plain + "0" if plain.endswith(".") else plain


def format_count(count: int, noun: str) -> str:
    """Put a number before its noun.

    >>> [format_count(count, "tensor") for count in (1, 1200)]
    ['1 tensor', '1,200 tensors']
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_against(value: float, limit: float) -> tuple[str, str]:
    """Format both numbers with enough digits to show which one is larger.

    A ratio of 3.004 over a limit of 3 must not be printed as 3.0 over 3.0.
    """
    digits = DIGITS
    texts = format_number(value, digits), format_number(limit, digits)
    while value != limit and texts[0] == texts[1] and digits < _MOST_DIGITS:
        digits += 1
        texts = format_number(value, digits), format_number(limit, digits)
    return texts


class DiagnosisEntry(Record):
    """One entry of diagnoses.toml or terms.toml."""

    verdict: Outcome | None = None
    """None for a word that goes with no outcome."""
    summary: str
    summary_without_place: str = ""
    """The summary for a verdict without a place; "" for the same."""
    meaning: str
    causes: list[str]
    advice: str


@cache
def load_diagnoses() -> dict[str, DiagnosisEntry]:
    """Load all diagnoses, by name."""
    return _load("diagnoses.toml")


def _load(file: str) -> dict[str, DiagnosisEntry]:
    entries = read_toml(Path(__file__).with_name(file))
    return {name: DiagnosisEntry.model_validate(entry) for name, entry in entries.items()}


def describe_diagnosis(name: str) -> str:
    """Return the text of `assay explain` for a diagnosis, level, word of terms.toml or exit code, in paragraphs.

    Raises: UsageError for an unknown name, with the nearest one.
    """
    entries = _load_entries()
    entry = entries.get({str(one.exit_code): one.value for one in Outcome}.get(name, name))
    levels = [
        f"{name} is a level of {command}: {questions[name]}"
        for command, questions in LEVEL_QUESTIONS.items()
        if name in questions
    ]
    if entry is None:
        if levels:
            return "\n\n".join(levels)
        known = dict.fromkeys([*entries, *chain.from_iterable(LEVEL_QUESTIONS.values())])
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"
        raise UsageError(f"unknown diagnosis or level {name!r}{hint}")
    verdict = f" ({entry.verdict})" if entry.verdict not in (None, name) else ""
    return "\n\n".join([
        f"{name}{verdict}: {entry.summary}.",
        entry.meaning.strip(),
        f"Typical causes: {'; '.join(entry.causes)}.",
        f"What to do next: {entry.advice.strip()}",
        *levels,
    ])  # fmt: skip


def list_diagnoses() -> list[tuple[str, str, str]]:
    """Return name, verdict and summary of everything but levels that `describe_diagnosis` describes."""
    return [(name, entry.verdict or "", entry.summary) for name, entry in _load_entries().items()]


def _load_entries() -> dict[str, DiagnosisEntry]:
    return load_diagnoses() | _load("terms.toml")


# Signs in addition to colors, which some readers do not see.
OUTCOME_SIGNS = {Outcome.PASS: "✓", Outcome.FAIL: "✗", Outcome.NOT_COMPARED: "?"}

# By command. `assay compare` also has levels of `assay check`.
LEVEL_QUESTIONS = {
    "assay check": {
        "weights": "Are the weights the same?",
        "load": "Are the weights and settings those of the files?",
        "inputs": "Is the model called with the same inputs?",
        "tokens": "Are the same tokens generated?",
        "logits": "Do the same tokens have the same distributions?",
        "outputs": "Are the model's outputs the same?",
        "modules": "Does every part compute the same from the same inputs?",
        "sampler": "Does the sampler choose the same from the same logits?",
        "loss": "Is the loss the same?",
        "activations": "Does every part compute the same in the forward pass?",
        "gradients": "Are the gradients the same?",
        "updates": "Does the optimizer make the same updates?",
        "replicas": "Do all ranks hold the same parameters?",
        "checkpoint": "Is the loaded state equal to the saved state?",
        "overfit": "Does it memorize a few sequences, as the reference does?",
    },
    # Two dumps hold values that were already computed, each from its own inputs.
    "assay compare": {
        "completeness": "Does ACTUAL hold everything that EXPECTED holds?",
        "inputs": "Are the token ids of the prompts the same, and the labels?",
        "logits": "Do the dumped logits agree?",
        "modules": "Do the dumped inputs and outputs of modules agree?",
        "operations": "Do the dumped results of operations agree?",
        "gradients": "Do the dumped gradients agree?",
        "updates": "Do the dumped updates of parameters agree?",
    },
    "assay smoke run": {
        "run": "Do all runs make their steps in time?",
        "loss": "Are all steps logged, with finite losses?",
        "learning-rate": "Does a resumed run continue the schedule?",
        "checkpoint": "Does each checkpoint hold the model of its step?",
        "updates": "Does every parameter that is trained change?",
        "first-save": "Does a saved model include the last step before it?",
        "equivalent": "Does another division of the same rows train the same?",
        "resume": "Does a resumed run continue as the uninterrupted one?",
        "sigterm": "Does a terminated run leave a checkpoint that can be resumed?",
        "tear-down": "Does every run end without an error after its last step?",
        "leftovers": "Does nothing of a run remain on the machine?",
        "memory": "Is the device's memory used, and released?",
    },
    "assay smoke data": {
        "chat": "Does the template keep all turns, with one BOS and an end for each answer?",
        "labels": "Do exactly the answers have labels?",
        "collator": "Is each sample one row, whole, with its labels and masked padding?",
        "packing": "Does each packed sample train as it does alone?",
        "sampler": "Is every sample read once in each epoch, and the rest after a resume?",
        "batch-sampler": "Is every sample read once in each epoch, within the token budget?",
        "accumulation": "Does a step over micro-batches have the gradient of one big batch?",
        "workers": "Do workers and epochs draw different random numbers?",
    },
}
SUSPECTS_ORDER = "furthest over their limits first, equal ones in the order of the model"


class PhaseWords(NamedTuple):
    """The words of one phase."""

    subject: str
    """Subject of a sentence about the whole phase."""
    made_here: str
    """Evidence that an error is made in this phase."""
    is_plural: bool = False
    made_by_loading: str = ""
    """Evidence that loading a model makes the error, if it can."""


_BEFORE_MODULES = "no module has run yet: the error is made by"
_BEFORE_PHASE = "the gradients before it agree: the error is made here"
PHASES: dict[Phase, PhaseWords] = {
    "inputs": PhaseWords(
        "The inputs of the model",
        f"{_BEFORE_MODULES} the loop around the model",
        is_plural=True,
        made_by_loading=f"{_BEFORE_MODULES} the tokenizer or its chat template",
    ),
    "forward": PhaseWords(
        "(model)", "its inputs agree (they are the reference's own): the error is made here"
    ),
    "backward": PhaseWords(
        "The gradients of all parameters",
        "its inputs and output gradients are the reference's own: the error is made here",
        is_plural=True,
    ),
    "reduce": PhaseWords("The reduction of gradients", _BEFORE_PHASE),
    "clip": PhaseWords("The clipping of gradients", _BEFORE_PHASE),
    "optimizer": PhaseWords(
        "The optimizer step", "its gradients are the reference's own: the error is made here"
    ),
    "checkpoint": PhaseWords(
        "The checkpoint",
        "what was saved agrees with the reference: the error is made by saving or loading",
        made_by_loading=(
            "no setup function has run yet: the error is in the files, or in the code that loads them"
        ),
    ),
    "sampler": PhaseWords(
        "The sampler", "its logits are the reference's own: the error is made here"
    ),
}

READ_MEASUREMENTS = (
    "Every measurement, with all digits, is in measurements.jsonl next to this report."
)
TIE_WITH_OTHER_LOGITS = "another token was chosen, and the logits differ"
# Smaller errors are not written in percent.
LEAST_PERCENT = 1e-3
SEEN = "an error above it is always seen; below it, only some systematic ones are"
BLIND_PLACE = "at the place with the most noise, even zeros would agree"
TOKENS_ARE_NOT_JUDGED = (
    "Error of each token's row relative to the noise run's, with the reference's inputs injected into "
    "each module. Single cells are not judged: those of clean runs scatter up to 20 times. A fault "
    "appears as a line."
)
_TOKENS_OF_DUMPS = (
    "Error of each token's row at the output of each module, relative to the noise there. Single cells "
    "are not judged. An error spreads down from the module, and right from the token, that made it."
)
_DEPTH_OF_DUMPS = (
    "Accumulated error grows along the depth and hides its origin. The added error of a module is the "
    "error of its output beyond that of its inputs (the root of the difference of the squares), where "
    "both dumps hold them. After a fault, it includes amplified error."
)
TREE_MEANING = (
    "Each line shows the place furthest over its limit, or nearest to it, in the module and all that it "
    "contains. A module that the verdict or a suspect names has their ratio; the table of measurements has "
    "those of its other statistics. The worst child of each module is marked."
)
RANKS_MEANING = "The worst place on each rank, and the highest ratio / limit in each of its layers."
DEPTH_MEANING = (
    "Accumulated error grows along the depth and hides its origin. Replayed error is the error that each "
    "stage adds by itself: there, a fault is a single peak."
)
KL_MEANING = (
    "KL divergence of the distribution over the whole vocabulary from the exact reference's, for "
    "candidate and noise run."
)
_ERRORS_OF_CURVES = (
    "Errors are relative to the exact reference; the noise is the error of the noise run."
)
_OVERFIT_CURVES = (
    "Every step is on the same few sequences. The target is the highest loss of exact reference or "
    "noise run in the second half of their steps. The median of the candidate's last fifth has to reach it. "
    f"{_ERRORS_OF_CURVES} The judge also compares the first losses with their noise."
)
_FREE_CURVES = (
    "These steps train freely, without any value replaced; the resumed ones start from a checkpoint. "
    f"{_ERRORS_OF_CURVES} Single steps are not judged. The judge compares the root mean square of the "
    "loss errors with the noise times the weight drift, and the norm that clipping computes from the "
    "reference's gradients."
)
_LOGGED_CURVES = (
    "What each run logs. The resumed run starts from a checkpoint; the one with another split divides the "
    "rows of a step in another way. The levels above compare them."
)


def describe_sides(verdict: Verdict) -> str:
    """Name the candidate, and the reference that it is compared with."""
    name = verdict.model.get("name") or "the model"
    candidate = verdict.candidate.get("run") or "the candidate"
    reference = verdict.reference.get("run") or "the reference"
    if is_of_dumps(verdict):
        return one_line(f"{candidate} against {reference}")
    if case := verdict.candidate.get("case"):  # of smoke
        name = f"{case} with {name}" if verdict.model.get("name") else str(case)
        if "run" not in verdict.candidate:
            return one_line(name)
    return one_line(f"{name} on {candidate} against {reference}")


def is_of_dumps(verdict: Verdict) -> bool:
    """Return True for a verdict of `assay compare`."""
    return "format" in verdict.candidate


def describe_level(verdict: Verdict, name: str) -> str:
    """Return the question that a level answers; "" if it is unknown. A command may have questions of its own."""
    own = (verdict.levels[name].model_extra or {}).get("question")
    of_dumps = LEVEL_QUESTIONS["assay compare"] if is_of_dumps(verdict) else {}
    known = LEVEL_QUESTIONS["assay check"] | of_dumps
    return own if isinstance(own, str) else known.get(name, "")


def describe_cells(verdict: Verdict) -> str:
    """Explain the heat map."""
    return _TOKENS_OF_DUMPS if is_of_dumps(verdict) else TOKENS_ARE_NOT_JUDGED


def describe_depth(verdict: Verdict) -> str:
    """Explain the curve along the depth."""
    return _DEPTH_OF_DUMPS if is_of_dumps(verdict) else DEPTH_MEANING


def describe_curves(verdict: Verdict) -> str:
    """Explain the curves of training steps."""
    if "first-save" in verdict.levels:
        return _LOGGED_CURVES
    return _OVERFIT_CURVES if "overfit" in verdict.levels else _FREE_CURVES


def describe_place(location: Location) -> str:
    """Name the module, operation or parameter of `location`."""
    place = location.module or PHASES[location.phase].subject
    if location.module == "" and location.phase == "backward":
        place = "(model)"
    if location.op == "loss" and not location.module:
        return "The loss"
    if location.op:
        place += f", operation {location.op}"
    if location.parameter:
        # A parameter of the module just named goes by its last name.
        own = location.parameter.removeprefix(f"{location.module}.")
        place += f", parameter {own}"
    return one_line(place)


def describe_location(location: Location) -> str:
    """Describe a place with its phase, step and rank."""
    where = f"{location.phase}, step {location.step}"
    if location.rank:
        where += f", rank {location.rank}"
    return f"{describe_place(location)} ({where})"


def describe_port(port: str) -> str:
    """Name a port of the place just named, after a comma; "" for the result of a module.

    >>> [describe_port(port) for port in ("output", "cache.0.keys", "mlp.down_proj:input.input")]
    ['', ', cache.0.keys,', ', in what it passes to mlp.down_proj,']
    """
    module, _, name = port.rpartition(":")
    if module and name.startswith("input."):
        return f", in what it passes to {one_line(module)},"
    return "" if port in ("output", "output.0") else f", {one_line(port)},"


def describe_tokens(prompt: int, first: int, last: int, step: int) -> str:
    """Name one or several adjacent tokens of a prompt, with their decode step."""
    tokens = f"token {first}" if first == last else f"tokens {first} to {last}"
    decode = f" (decode step {step})" if step else ""
    return f"prompt {prompt}, {tokens}{decode}"


def is_against_target(statistic: str | None) -> bool:
    """Return True if the ratio of `statistic` is to a target instead of the noise run's error."""
    return statistic in STATISTICS and STATISTICS[statistic].judged_by in ("metric", "target")


def name_ratio(statistic: str | None) -> str:
    """Return the name of the deciding ratio."""
    return "times the target" if is_against_target(statistic) else "noise ratio"


def describe_statistic(statistic: str) -> str:
    """Name the value of `statistic`."""
    return STATISTICS[statistic].words if statistic in STATISTICS else statistic


def describe_error(statistic: str, error: float | None) -> str:
    """Describe `statistic` and its value, if known."""
    if error == 0 and statistic in STATISTICS and STATISTICS[statistic].at_zero:
        return STATISTICS[statistic].at_zero
    what = one_line(describe_statistic(statistic))
    return what if error is None else f"{what} {format_number(error)}"


def describe_seen(rows: Sequence[Measurement]) -> str:
    """State the relative error that would be seen at the place of coarsest resolution; "" without rows."""
    row = max(rows, key=lambda one: one.resolution, default=None)
    if row is None or not row.resolution:
        return ""
    if all(one.actual == 0 for one in rows):
        return "every value is equal"
    where = f"{one_line(row.module) or '(model)'}, {row.level}"
    if row.resolution >= 1:
        return f"{BLIND_PLACE} ({where})"
    percent = row.resolution >= LEAST_PERCENT
    shown = f"{format_number(100 * row.resolution)} %" if percent else format_number(row.resolution)
    return f"a difference above {shown} would be seen everywhere (coarsest: {where})"


def describe_rounding(packages: str) -> str:
    """Say what explains an error that is small enough for another rounding. packages: those that changed."""
    return (
        f"another rounding ({packages}) explains an error of up to {MOST_ROUNDING:g} limits, and so does a small"
        " fault of a library"
    )


def describe_judged(ratio: float, limit: float) -> str:
    """Show a ratio with its limit; without a limit, if the values are equal, as they must be."""
    if not limit:
        return "not equal" if ratio else "equal"
    if not math.isfinite(ratio):
        return f"{describe_ratio(ratio)} / {format_number(limit)}x"
    shown, shown_limit = format_against(ratio, limit)
    return f"{shown}x / {shown_limit}x"


def describe_ratio(ratio: float) -> str:
    """Show a ratio without its limit."""
    return f"{format_number(ratio)}x" if math.isfinite(ratio) and ratio else format_number(ratio)


def describe_counts(outcomes: list[Outcome]) -> str:
    """Count the outcomes of several runs, worst first."""
    counts = Counter(outcomes)
    worst_first = reversed(list(Outcome))
    return ", ".join(f"{counts[one]:,} {one.value}" for one in worst_first if counts[one])


def describe_pooling(width: int) -> str:
    """Explain a picture in which one place shows several tokens."""
    return f"Each cell shows the worst of up to {width} adjacent tokens."
