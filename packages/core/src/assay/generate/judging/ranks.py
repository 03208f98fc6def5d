"""The judgement of a candidate on several ranks: each rank is judged, the worst decides."""

from collections.abc import Sequence
from dataclasses import replace

from assay.errors import name_some
from assay.generate.judging.verdict import Judgement
from assay.generate.processes.requests import CandidateReport
from assay.verdicts import Outcome

_SEVERITY = (Outcome.PASS, Outcome.NOT_COMPARED, Outcome.FAIL)

# Facts about a rank's own weights, which explain the results of all ranks.
_WEIGHT_FACTS = ("weights_different", "untied")


def merge_weight_facts(reports: Sequence[CandidateReport]) -> list[CandidateReport]:
    """Give each report the weight facts of all ranks."""
    merged = {
        name: sorted({fact for report in reports for fact in getattr(report, name)})
        for name in _WEIGHT_FACTS
    }
    return [report.model_copy(update=merged) for report in reports]


def worst_of_ranks(judgements: Sequence[Judgement]) -> Judgement:
    """Return the judgement of the worst rank, with a note on the ranks with the same outcome.

    judgements: by rank. The location names the rank unless all ranks have the same outcome: sharded
    values are gathered before they are measured, so an error in them appears on all ranks.
    """
    number = max(range(len(judgements)), key=lambda rank: _badness(judgements[rank]))
    worst = judgements[number]
    outcome = worst.verdict.verdict
    alike = [rank for rank, one in enumerate(judgements) if one.verdict.verdict is outcome]
    note = f"each of {len(judgements)} ranks is judged; {outcome.value}: "
    note += "all" if len(alike) == len(judgements) else f"rank {name_some([*map(str, alike)])}"
    update: dict[str, object] = {"notes": [*worst.verdict.notes, note]}
    location = worst.verdict.location
    if location is not None and len(alike) < len(judgements):
        update["location"] = location.model_copy(update={"rank": number})
    measurements = [row.model_copy(update={"rank": number}) for row in worst.measurements]
    return replace(
        worst, verdict=worst.verdict.model_copy(update=update), measurements=measurements
    )


def _badness(judgement: Judgement) -> tuple[int, float]:
    """Return a sort key: the outcome, then the ratio over its limit."""
    verdict = judgement.verdict
    ratio = verdict.noise_ratio / verdict.limit if verdict.noise_ratio and verdict.limit else 0.0
    # Written so that NaN, which max() would ignore, is the worst.
    return _SEVERITY.index(verdict.verdict), ratio if ratio >= 0 else float("inf")
