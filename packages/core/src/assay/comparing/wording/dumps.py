"""The sentences of a comparison of two dumps."""

from assay.comparing.levels import JudgedRatio
from assay.comparing.limits import Limits
from assay.comparing.results import PortResult
from assay.comparing.wording.numerals import format_against, format_number
from assay.comparing.wording.phrases import describe_error, describe_location, describe_statistic
from assay.errors import name_some
from assay.stages import METRICS
from assay.verdicts import Location

EXPECTED_NOISE = "the noise expected of its dtype and depth"
REPLAY_NOISE = "the noise of the model in the same dtype"
REPLAY_AGREES = (
    "every module of ACTUAL computes what the model computes from the same inputs: the difference is"
    " made by EXPECTED or outside of the modules"
)

_EVIDENCE = {
    "replayed": "recomputed from its dumped inputs, it differs: the error is made here",
    "inputs agree": "its inputs agree: the error is made here",
    "growth": "all earlier results agree: the error is made here or in code whose results were not"
    " dumped",
}


def describe_difference(item: JudgedRatio, noise: str) -> str:
    """Describe one ratio over its limit. noise: whose noise it is, as in "the noise of DUMP"."""
    ratio, limit = item.ratio, item.limit
    if ratio.statistic == "non-finite":
        return "NaN or infinity where the expected value is finite"
    if ratio.statistic == "exact":
        return f"{format_number(ratio.actual)} of the values differ; they must be equal"
    if ratio.statistic in METRICS:
        shown, shown_limit = format_against(ratio.actual, ratio.expected)
        return f"{describe_statistic(ratio.statistic)} {shown} (limit {shown_limit})"
    shown, shown_limit = format_against(ratio.value, limit)
    error = describe_error(ratio.statistic, ratio.actual)
    return f"{error} = {shown}x {noise} (limit {shown_limit}x)"


def note_on_metric_limits(limits: Limits, dtype: str) -> list[str]:
    """State which metrics decide, and their limits; nothing if none does."""
    listed = ", ".join(
        f"{describe_statistic(name)} {format_number(limit)}"
        for name, limit in limits.by_statistic.items()
        if name in METRICS
    )
    text = f"decided by the limits {limits.name!r} for {dtype}, {limits.origin}: {listed}"
    return [text] if listed else []


def describe_evidence(evidence: str) -> str:
    """Describe how the place was found."""
    return _EVIDENCE[evidence]


def headline_of_place(location: Location) -> str:
    """State where the two dumps first differ."""
    return f"{describe_location(location)} is the first that differs."


def headline_of_weight(name: str, result: PortResult, num_others: int) -> str:
    """State which parameter differs, and where most."""
    worst, count = result.sums.worst, result.exact
    row, column = worst.index[1:] if worst.index else (0, 0)
    others = f"; {num_others:,} more parameters differ" if num_others else ""
    return (
        f"{name} differs in {count.num_different:,} of {count.num_compared:,} values, most at row {row},"
        f" column {column}: {format_number(worst.actual)}, expected {format_number(worst.expected)}"
        f"{others}."
    )


def headline_of_agreement(compared: int, missing: list[str]) -> str:
    """State that all pairs agree, and what has no partner."""
    if not compared:
        return "Nothing could be compared."
    if not missing:
        return f"The dumps agree in all {compared:,} tensors."
    count = "1 expected item has" if len(missing) == 1 else f"{len(missing):,} expected items have"
    return f"Everything with a partner agrees ({compared:,} tensors); {count} none."


def describe_missing(missing: list[str]) -> str:
    """Name expected items without a partner."""
    return f"without a partner ({len(missing):,}): {name_some(missing)}"


def describe_left_out(places: list[str]) -> str:
    """Name places of which no token is comparable."""
    return (
        f"no comparable token is left at {len(places):,} places, after different tokens or expert"
        f" choices: {name_some(places)}"
    )


def describe_topology(count: int) -> str:
    """Note that modules were matched without names."""
    return (
        f"the dumps name modules differently: {count:,} are matched by order, kind and width; --map"
        " overrides"
    )


def describe_norms_only(count: int) -> str:
    """State that values were not compared."""
    return (
        f"{count:,} places are compared by the norms of their tensors only, which an error may keep;"
        " --stats accepts that"
    )


def describe_flips(count: int, module: str, prompt: int, position: int) -> str:
    """Note tokens that went to other experts at near ties, and the place of the first one."""
    return (
        f"expert choices that differ at near ties: {count:,}, first in {module} at prompt {prompt},"
        f" position {position}; their tokens are left out from there on"
    )
