"""The files that `assay bench compare` writes."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from assay.files import seal, write_whole
from assay.runs.results import write_results
from assay_bench.baselines.records import is_baseline, read_baseline
from assay_bench.comparing.judging import EvaluationComparison, TaskComparison, compare
from assay_bench.comparing.pairing import Pair
from assay_bench.comparing.terms import Terms
from assay_bench.comparing.verdicts import verdict_of
from assay_bench.evaluations.items import Evaluation
from assay_bench.evaluations.reading import read_evaluation
from assay_bench.reporting.markdown import comparison_as_markdown

JSON_FILE, MARKDOWN_FILE = "comparison.json", "comparison.md"


def compare_folders(
    base: Path, candidate: Path, terms: Terms, clusters: Mapping[str, str], folder: Path
) -> str:
    """Compare two evaluations and write verdict, JSON and Markdown. Returns: the Markdown."""
    found = compare(_read(base, clusters), _read(candidate, clusters), terms)
    write_whole(folder / JSON_FILE, comparison_as_json(found))
    text = comparison_as_markdown(found)
    write_whole(folder / MARKDOWN_FILE, text)
    write_results(*verdict_of(found), folder)
    return text


def _read(path: Path, clusters: Mapping[str, str]) -> Evaluation:
    """Read an evaluation or a baseline."""
    if is_baseline(path):
        return read_baseline(path).evaluation()
    return read_evaluation(path, clusters)


def comparison_as_json(comparison: EvaluationComparison) -> str:
    """Format comparison.json: every measure, and every item that only one side got right."""
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
