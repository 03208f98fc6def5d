"""A comparison as JSON, for programs: every measure, and every item that only one side got right."""

from dataclasses import asdict
from typing import Any

from assay.files import seal
from assay_bench.comparing.judging import Comparison, TaskComparison
from assay_bench.comparing.pairing import Pair


def comparison_as_json(comparison: Comparison) -> str:
    """Schema 1 of comparison.json."""
    record = {
        "schema": 1,
        "judged": comparison.judged,
        "base": comparison.base.name,
        "candidate": comparison.candidate.name,
        "terms": comparison.terms.model_dump(),
        "refused": list(comparison.refused),
        "notes": list(comparison.notes),
        "tasks": [_task(task) for task in comparison.tasks],
    }
    return seal(record)


def _task(task: TaskComparison) -> dict[str, Any]:
    return {
        "name": task.name,
        "judged": task.judged,
        "problem": task.problem,
        "measures": [asdict(measure) for measure in task.measures],
        "lost": [_flip(pair) for pair in task.lost],
        "gained": [_flip(pair) for pair in task.gained],
    }


def _flip(pair: Pair) -> dict[str, Any]:
    base, candidate = pair
    return {
        "key": candidate.key,
        "question": candidate.question or base.question,
        "target": candidate.target or base.target,
        "base": base.answer,
        "candidate": candidate.answer,
    }
