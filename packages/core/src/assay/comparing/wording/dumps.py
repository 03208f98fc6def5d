"""The sentences of a comparison of two dumps."""

from collections.abc import Sequence

from assay.comparing.levels import JudgedRatio
from assay.comparing.limits import Limits
from assay.comparing.results import PortResult
from assay.comparing.wording.numerals import format_against, format_count, format_number
from assay.comparing.wording.phrases import describe_error, describe_location, describe_statistic
from assay.dtypes import FORMATS
from assay.errors import name_some
from assay.statistics import METRICS
from assay.verdicts import Location

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

_FIRST_RESULT = "growth"
_EVIDENCE = {
    "replayed": "recomputed from its dumped inputs, it differs: the error is made here",
    "inputs agree": "its inputs agree: the error is made here",
    _FIRST_RESULT: "it is the first compared result that differs: the error is made here or in code whose"
    " results were not compared",
}


def describe_origin(item: JudgedRatio, noise: str, evidence: str) -> str:
    """Describe the ratio over its limit that names the place, and how the place was found.

    noise: the source of the noise, as in "the noise of DUMP".
    """
    return f"{_describe_difference(item, noise, evidence)}; {_EVIDENCE[evidence]}"


def _describe_difference(item: JudgedRatio, noise: str, evidence: str) -> str:
    ratio, limit = item.ratio, item.limit
    if ratio.statistic == "non-finite":
        return "NaN or infinity where the expected value is finite"
    if ratio.statistic == "exact":
        return f"{format_number(ratio.actual)} of the values differ; they must be equal"
    if ratio.statistic in METRICS:
        shown, shown_limit = format_against(ratio.actual, ratio.expected)
        return f"{describe_statistic(ratio.statistic)} {shown} (limit {shown_limit})"
    shown, shown_limit = format_against(ratio.value, limit)
    # An error that is made at the place is not accumulated.
    is_accumulated = evidence == _FIRST_RESULT or ratio.statistic != "accumulated"
    error = describe_error(ratio.statistic if is_accumulated else "replay-tensor", ratio.actual)
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


def describe_token_rows(num_tokens: int) -> str:
    """State which rows of single tokens are kept."""
    return (
        f"errors of single tokens are kept for the outer modules and for the {num_tokens:,} tokens with"
        " the largest ones; all were judged"
    )


def headline_of_place(location: Location) -> str:
    """State where the two dumps first differ."""
    return f"{describe_location(location)} is the first that differs."


def headline_of_weight(name: str, result: PortResult, num_others: int) -> str:
    """State which parameter differs, and the largest difference."""
    worst, count = result.sums.worst, result.exact
    row, column = worst.index[1:] if worst.index else (0, 0)
    others = f"; so do {format_count(num_others, 'other parameter')}" if num_others else ""
    return (
        f"{name} differs in {count.num_different:,} of {count.num_compared:,} values, most at row {row},"
        f" column {column}: {format_number(worst.actual)}, expected {format_number(worst.expected)}"
        f"{others}."
    )


def headline_of_quantized(module: str, side: str, sign: str) -> str:
    """State that a layer is quantized on one side only. sign: the reason for it."""
    return f"{module} is quantized in {side} only: {sign}."


def describe_stored(dtype: str) -> str:
    """Describe a stored dtype that shows quantization."""
    return f"its weight is stored as {dtype}"


def describe_coarse(what: str, actual: float, expected: float) -> str:
    """Describe coarse values that show quantization. actual, expected: shares of distinct values."""
    return f"{actual:.0%} of the {what} in a row are distinct, expected {expected:.0%}"


def note_on_quantized(modules: list[str]) -> list[str]:
    """List the layers that only one side quantizes."""
    text = f"quantized on one side only ({len(modules):,}): {name_some(modules)}"
    return [text] if modules else []


def note_on_sign_flips(count: int) -> list[str]:
    """State how many elements of updates were not judged."""
    text = (
        f"{format_count(count, 'element')} of updates not judged: a gradient near zero moves a weight"
        " by the learning rate in either direction"
    )
    return [text] if count else []


def headline_of_agreement(compared: int, missing: list[str], norms: int) -> str:
    """State that all pairs agree, and count the missing. norms: places compared by norms only."""
    if not compared:
        return "Nothing could be compared."
    if not missing:
        what = "The norms of the dumps agree" if norms else "The dumps agree"
        return f"{what} in {'all ' if compared > 1 else ''}{format_count(compared, 'tensor')}."
    count = "1 expected item has" if len(missing) == 1 else f"{len(missing):,} expected items have"
    tensors = format_count(compared, "tensor")
    return f"Everything with a partner agrees ({tensors}); {count} none."


def describe_missing(missing: list[str]) -> str:
    """List expected items without a partner."""
    return f"without a partner ({len(missing):,}): {name_some(missing)}"


def describe_unknown_rows(port: str) -> str:
    """State that the rows of a port inside fused experts have no known token."""
    return f"{port}: the recorded expert choices do not tell the tokens of its rows"


def describe_left_out(places: list[str]) -> str:
    """List places without a comparable token."""
    return (
        f"no comparable token is left at {format_count(len(places), 'place')}, after different tokens or expert"
        f" choices: {name_some(places)}"
    )


def describe_unknown(places: list[str]) -> str:
    """List places where EXPECTED holds NaN or infinity and ACTUAL another value."""
    return f"EXPECTED holds NaN or infinity at {len(places):,} places: {name_some(places)}"


def describe_wrong_replica(port: str, rank: int, error: float) -> str:
    """State that ranks of EXPECTED differ where they must hold the same values."""
    return f"EXPECTED holds another {port} on rank {rank} than on the first one: error {error:.2g}"


def describe_topology(count: int) -> str:
    """Note that modules were matched without names."""
    return (
        f"the dumps name modules differently: {format_count(count, 'module')} matched by order, kind"
        " and width; --map overrides"
    )


def describe_residuals(side: str) -> str:
    """Note that a side keeps hidden state and residual apart."""
    return f"{side} keeps hidden states and residuals apart: their sums are compared"


def describe_reused(steps: list[int], modules: list[str]) -> str:
    """State that a dump holds one decode step in place of others."""
    return (
        f"the same values in steps {', '.join(map(str, steps))}, though their tokens differ:"
        f" a buffer was reused, as by a captured graph ({format_count(len(modules), 'module')}:"
        f" {name_some(modules)})"
    )


def describe_cut_off(step: int, rank: int, module: str) -> str:
    """State where an incomplete dump ends. module: the last one."""
    where = f"rank {rank}, step {step}" if rank else f"step {step}"
    return f"the run was cut off in {where}: its last results are those of {module or '(model)'}"


def describe_repeats(side: str, places: list[str]) -> str:
    """Note calls that a side recorded twice."""
    return f"{side} holds the same values twice in a pass: {name_some(places)}"


def describe_blind(places: Sequence[str]) -> str:
    """State that the expected noise hides any error at some places."""
    return (
        f"{format_count(len(places), 'place')} with so much expected noise that zeros would agree,"
        f" such as {places[0]}; --noise DUMP measures it"
    )


def describe_norms_only(count: int) -> str:
    """State that values were not compared."""
    return (
        f"{format_count(count, 'place')} compared by the norms of tensors only, which an error may keep;"
        " --stats accepts that"
    )


def describe_flips(count: int, module: str, prompt: int, position: int) -> str:
    """Note tokens that went to other experts at near ties, and the place of the first one."""
    return (
        f"expert choices that differ at near ties: {count:,}, first in {module} at prompt {prompt},"
        f" position {position}; their tokens are left out from there on"
    )


def describe_noise(origin: str, resolution: float, *, coarse: bool) -> str:
    """State the noise that errors were compared with. coarse: a noise dump would show smaller ones."""
    advice = "; --noise DUMP shows smaller ones" if coarse else ""
    return (
        f"judged by {origin}: a relative error below {format_number(resolution)} may not have been"
        f" seen{advice}"
    )


def describe_lacking_noise(places: list[str]) -> str:
    """List places that the noise dump lacks."""
    return (
        f"the noise dump lacks {format_count(len(places), 'place')}, judged by {EXPECTED_NOISE}:"
        f" {name_some(places)}"
    )


def describe_extra(names: list[str]) -> str:
    """List items that only ACTUAL holds."""
    return f"only in ACTUAL ({len(names):,}): {name_some(names)}"


def describe_allowed(count: int) -> str:
    """Count the items that a GLOB excused."""
    return f"expected items that --allow-unmatched excuses: {count:,}"


def describe_dtypes(expected: str, actual: str) -> str:
    """Note that the sides compute in different dtypes, and that they may be swapped."""
    is_coarser = FORMATS[expected].unit_roundoff > FORMATS[actual].unit_roundoff
    question = "; EXPECTED is usually the finer one: are the two swapped?" if is_coarser else ""
    return f"EXPECTED holds {expected}, ACTUAL {actual}{question}"


def describe_replay(num_ports: int, model: str) -> str:
    """Count the replayed module boundaries."""
    return f"module boundaries of ACTUAL that are replayed with {model}: {num_ports:,}"
