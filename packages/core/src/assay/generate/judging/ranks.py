"""Ranks that compute one model together: each is judged, and the worst decides."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from assay.errors import name_some
from assay.generate.judging.verdict import Judgement
from assay.verdicts import Outcome

_SEVERITY = (Outcome.PASS, Outcome.NOT_COMPARED, Outcome.FAIL)


# What a rank finds of its own weights, and what then explains the results of all.
_UNITED = ("weights_different", "untied")


def with_facts_of_all(reports: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The reports, each with what any rank found of its weights: all compute one model together."""
    united = {
        name: sorted({found for report in reports for found in report[name]}) for name in _UNITED
    }
    return [dict(report) | united for report in reports]


def worst_of_ranks(judgements: Sequence[Judgement]) -> Judgement:
    """The judgement of the worst rank, with a note that names those which are as bad.

    judgements: by rank. Its location names the rank, unless all ranks fail there: what is divided is
    put together before it is measured, and is then wrong on all.
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
    """How bad it is, and of those equally bad how close to its limit or over it."""
    verdict = judgement.verdict
    ratio = verdict.noise_ratio / verdict.limit if verdict.noise_ratio and verdict.limit else 0.0
    # Written so that a NaN, which max() would hide, is the worst.
    return _SEVERITY.index(verdict.verdict), ratio if ratio >= 0 else float("inf")
