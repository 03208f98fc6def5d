"""From a comparison of stored weights to a verdict."""

from assay.comparing.levels import MOST_LISTED, list_unmatched, outcome_of_levels
from assay.comparing.wording.dumps import describe_missing
from assay.comparing.wording.weights import (
    describe_finding,
    describe_resolution,
    headline_of_weights,
)
from assay.models.quantization.results import WeightComparison, WeightResult
from assay.verdicts import Level, Location, Measurement, Outcome, Verdict


def judge_weights(comparison: WeightComparison) -> tuple[Verdict, list[Measurement]]:
    """Return the verdict on two folders of weights, and one row for each weight."""
    levels = {
        "completeness": _judge_completeness(comparison),
        "weights": judge_level(comparison),
    }
    outcome = outcome_of_levels(levels)
    is_failure = outcome is Outcome.FAIL
    worst = comparison.findings[0] if comparison.findings else None
    return Verdict(
        verdict=outcome,
        levels=levels,
        location=_locate(worst.weight) if worst and worst.cause != "shard" else None,
        diagnosis="weight-mismatch" if is_failure else None,
        notes=_list_rescaled(comparison),
        noise_ratio=worst.ratio if worst else None,
        statistic="weight-error" if worst else None,
        resolution=max((one.resolution for one in comparison.results), default=None),
        compared=len(comparison.results),
        unmatched=list_unmatched(comparison.unmatched_expected, comparison.unmatched_actual),
        headline=headline_of_weights(comparison),
    ), [_row(one, order) for order, one in enumerate(comparison.results)]


def judge_level(comparison: WeightComparison) -> Level:
    """Return the level `weights`: its reason lists the findings, worst first."""
    count = len(comparison.results)
    if not count:
        return Level(verdict=Outcome.NOT_COMPARED, reason="no weight has a partner")
    if comparison.findings:
        reasons = [describe_finding(one) for one in comparison.findings[:MOST_LISTED]]
        return Level(verdict=Outcome.FAIL, reason="; ".join(reasons), compared=count)
    return Level(verdict=Outcome.PASS, reason=describe_resolution(comparison), compared=count)


def _judge_completeness(comparison: WeightComparison) -> Level:
    missing = [*comparison.unmatched_expected, *comparison.not_compared]
    if missing:
        return Level(verdict=Outcome.NOT_COMPARED, reason=describe_missing(missing))
    return Level(verdict=Outcome.PASS, compared=len(comparison.results))


def _locate(weight: str) -> Location:
    return Location(phase="forward", module=weight.rpartition(".")[0], parameter=weight)


def _list_rescaled(comparison: WeightComparison) -> list[str]:
    names = [one.name for one in comparison.results if one.is_rescaled]
    if not names:
        return []
    return [
        f"{len(names):,} weights have scales that others take back, as AWQ does: {names[0]}, ..."
    ]


def _row(result: WeightResult, order: int) -> Measurement:
    module, _, name = result.name.rpartition(".")
    return Measurement(
        level="weights", module=module, port=f"parameter.{name}", order=order,
        statistic="weight-error", actual=result.error, expected=result.best,
        ratio=result.worst_ratio,
    )  # fmt: skip
