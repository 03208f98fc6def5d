"""What `assay bench compare` does, apart from its options: two folders in, a folder out."""

from collections.abc import Mapping
from pathlib import Path

from assay.files import write_whole
from assay.runs.results import write_results
from assay_bench.baselines.records import is_baseline, read_baseline
from assay_bench.comparing.judging import compare
from assay_bench.comparing.terms import Terms
from assay_bench.comparing.verdicts import verdict_of
from assay_bench.evaluations.items import Evaluation
from assay_bench.evaluations.reading import read_evaluation
from assay_bench.reporting.json_file import comparison_as_json
from assay_bench.reporting.markdown import comparison_as_markdown

JSON_FILE, MARKDOWN_FILE = "comparison.json", "comparison.md"


def compare_folders(
    base: Path, candidate: Path, terms: Terms, clusters: Mapping[str, str], folder: Path
) -> str:
    """Write verdict, JSON and Markdown into `folder`. Returns: the Markdown."""
    found = compare(_read(base, clusters), _read(candidate, clusters), terms)
    write_whole(folder / JSON_FILE, comparison_as_json(found))
    text = comparison_as_markdown(found)
    write_whole(folder / MARKDOWN_FILE, text)
    write_results(*verdict_of(found), folder)
    return text


def _read(path: Path, clusters: Mapping[str, str]) -> Evaluation:
    """An evaluation, or what was accepted as a baseline."""
    if is_baseline(path):
        return read_baseline(path).evaluation()
    return read_evaluation(path, clusters)
