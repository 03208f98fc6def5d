"""The sentences of a comparison of stored weights."""

from assay.comparing.wording.numerals import format_count, format_number
from assay.foreign_text import shorten
from assay.models.quantization.results import WeightComparison, WeightFault, WeightRegion


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
