"""The sentences of a comparison of two dumps, and of stored weights."""

from assay.errors import name_some
from assay.foreign_text import shorten
from assay.judge.limits import Limits
from assay.judge.results import PortResult
from assay.judge.wording import (
    describe_error,
    describe_statistic,
    format_against,
    format_count,
    format_number,
)
from assay.models.quantization.judging import WeightComparison, WeightFault, WeightRegion
from assay.statistics import METRICS
from assay.verdicts import Ratio

EXPECTED_NOISE = "the noise expected of its dtype and depth"
REPLAY_NOISE = "the noise of the model in the same dtype"
UNRELATED = "no prompt of EXPECTED is in ACTUAL"
REPLAY_AGREES = (
    "every module of ACTUAL computes what the model computes from the same inputs: the difference is"
    " made by EXPECTED or outside of the modules"
)
REUSED = (
    "ACTUAL holds the same values there for different tokens: a reused buffer, of the dump or of the"
    " model."
)

UNORDERED = (
    "EXPECTED does not record the order of its calls: places are ordered by name and block number;"
    " --order FILE states the order"
)

_FIRST_RESULT = "growth"
_EVIDENCE = {
    "replayed": "recomputed from its dumped inputs, it differs: the error is made here",
    "inputs agree": "its inputs agree: the error is made here",
    _FIRST_RESULT: "it is the first compared result that differs: the error is made here or in code whose"
    " results were not compared",
    "given": "it is an input of the run",
    "unlike": "it agrees after backward, and clipping multiplies all gradients by one factor: something"
    " else changes it between backward and the optimizer step",
}


def describe_origin(item: Ratio, noise: str, evidence: str, port: str) -> str:
    """Describe the ratio over its limit that names the place, and how the place was found.

    noise: the source of the noise, as in "the noise of DUMP".
    """
    return f"{_describe_difference(item, noise, evidence, port)}; {_EVIDENCE[evidence]}"


def _describe_difference(item: Ratio, noise: str, evidence: str, port: str) -> str:
    if item.statistic == "non-finite":
        return "NaN or infinity where the expected value is finite"
    if item.statistic == "exact":
        share = f"{format_number(item.actual)} of the values of {port} differ"
        return f"{share}; they must be equal"
    if item.statistic in METRICS:
        shown, shown_limit = format_against(item.actual, item.expected)
        return f"{describe_statistic(item.statistic)} {shown} (limit {shown_limit})"
    shown, shown_limit = format_against(item.value, item.limit)
    # An error that is made at the place is not accumulated.
    is_accumulated = evidence == _FIRST_RESULT or item.statistic != "accumulated"
    error = describe_error(item.statistic if is_accumulated else "replay-tensor", item.actual)
    return f"{error} = {shown}x {noise} (limit {shown_limit}x)"


def note_on_metric_limits(limits: Limits, dtype: str) -> list[str]:
    """List the metrics that decide, and their limits."""
    listed = ", ".join(
        f"{describe_statistic(name)} {format_number(limit)}"
        for name, limit in limits.by_statistic.items()
        if name in METRICS
    )
    text = f"decided by the limits {limits.name!r} for {dtype}, {limits.origin}: {listed}"
    return [text] if listed else []


def headline_of_weight(name: str, result: PortResult, judged: Ratio, num_others: int) -> str:
    """State which parameter differs, and the largest difference."""
    worst, count = result.sums.worst, result.exact
    row, column = worst.index[1:] if worst.index else (0, 0)
    is_vector = sum(len(rows.error) for rows in result.sums.rows) == count.num_compared
    place = f"element {row}" if is_vector else f"row {row}, column {column}"
    verb = "does" if num_others == 1 else "do"
    others = f"; so {verb} {format_count(num_others, 'other parameter')}" if num_others else ""
    if not count.num_compared:  # the dumps hold statistics
        return f"{name} differs: {describe_error(judged.statistic, judged.actual)}{others}."
    return (
        f"{name} differs in {count.num_different:,} of {count.num_compared:,} values, most at {place}:"
        f" {format_number(worst.actual)}, expected {format_number(worst.expected)}{others}."
    )


def headline_without_place(places: list[str]) -> str:
    """List the places that differ, the worst first, if the first one in the model is not known."""
    if not places:
        return "The dumps differ."
    return f"{len(places):,} places differ, and the first is not known; the worst are {name_some(places)}."


def headline_of_agreement(
    compared: int, missing: list[str], norms: int, seen: str, coarse_limits: str
) -> str:
    """State that all pairs agree, and count the missing.

    norms: places compared by norms only. seen: what the comparison could see; "" if it is unknown.
    coarse_limits: name of the limits within which pairs differ, if those do not depend on noise; else "".
    """
    within = f"within the limits {coarse_limits!r}"
    if not compared:
        return "Nothing could be compared."
    if not missing:
        what = "The norms of the dumps agree" if norms else "The dumps agree"
        what = f"The dumps are {within}" if coarse_limits else what
        tensors = f"{'all ' if compared > 1 else ''}{format_count(compared, 'tensor')}"
        return f"{what} in {tensors}{f'; {seen}' if seen else ''}."
    count = "1 expected item has" if len(missing) == 1 else f"{len(missing):,} expected items have"
    tensors = format_count(compared, "tensor")
    others = f" Of the others, {seen}." if seen else ""
    verb = f"is {within}" if coarse_limits else "agrees"
    return f"Everything with a partner {verb} ({tensors}); {count} none.{others}"


def describe_missing(missing: list[str]) -> str:
    """List expected items without a partner."""
    return f"without a partner ({len(missing):,}): {name_some(missing)}"


def describe_finding(finding: WeightFault) -> str:
    """Describe one fault: its place, its cause, and its error with the best possible one."""
    if finding.cause == "shard":
        return (
            f"{finding.weight}: {finding.amount:.0f} of its weights are other weights;"
            f" {_describe_errors(finding)}"
        )
    place = f", {describe_place(finding.place)}" if finding.place else ""
    return f"{finding.weight}{place}: {_describe_cause(finding)}; {_describe_errors(finding)}"


def describe_place(place: WeightRegion) -> str:
    """Describe rows and columns.

    >>> describe_place(WeightRegion(range(3, 4), (0, 1, 2)))
    'row 3, columns 0-2'
    """
    first, last = place.rows[0], place.rows[-1]
    rows = f"row {first}" if first == last else f"rows {first}-{last}"
    if not place.columns:
        return rows
    first, last = place.columns[0], place.columns[-1]
    if last - first + 1 == len(place.columns):
        return f"{rows}, columns {first}-{last}"
    return f"{rows}, {len(place.columns)} columns from {first} to {last}"


def headline_of_weights(comparison: WeightComparison) -> str:
    """State the worst fault, or the agreement."""
    count = len(comparison.results)
    if not count:
        return "Nothing could be compared."
    if not comparison.findings:
        groups = format_count(comparison.num_groups, "group")
        return f"The weights agree, as far as their formats allow: {format_count(count, 'weight')}, {groups}."
    others = len(comparison.findings) - 1
    more = f" {format_count(others, 'more finding')}." if others else ""
    return f"{describe_finding(comparison.findings[0])}.{more}"


def describe_resolution(comparison: WeightComparison) -> str:
    """State how small an error of one scale would have been found."""
    worst = max((one.resolution for one in comparison.results), default=0.0)
    name = next((one.name for one in comparison.results if one.resolution == worst), "")
    return f"an error of one scale below {format_number(100 * worst)} % may be unseen (in {name})"


def describe_setting(key: str, expected: object, actual: object) -> str:
    """Describe a key of config.json that differs.

    >>> describe_setting("rms_norm_eps", 1e-06, 1e-05)
    'config.json: rms_norm_eps is 1e-06 in EXPECTED, 1e-05 in ACTUAL'
    """
    return f"config.json: {key} is {shorten(expected)} in EXPECTED, {shorten(actual)} in ACTUAL"


def headline_of_settings(certain: list[str]) -> str:
    """State the settings that change a result."""
    more = f" (and {len(certain) - 1} more)" if len(certain) > 1 else ""
    return f"The configurations differ: {certain[0]}{more}."


def _describe_cause(finding: WeightFault) -> str:
    amount = finding.amount
    each = "its" if finding.place else "every"
    if finding.cause == "scale":
        return f"{each} scale is {format_number(amount)}x the right one"
    if finding.cause == "zero-point":
        return f"{each} zero point is off by {amount:+.2g} steps"
    if finding.partner is not None:
        where = describe_place(finding.partner)
        if finding.cause == "swapped":
            return f"it holds the values of {where}"
        return f"its scale and zero point are those of {where}"
    return "its values differ"


def _describe_errors(finding: WeightFault) -> str:
    error, best = format_number(finding.error), format_number(finding.best)
    if not finding.best:
        return f"relative error {error}, where the values must be equal"
    ratio = format_number(finding.ratio)
    return f"relative error {error} = {ratio}x the best that the format can reach ({best})"
