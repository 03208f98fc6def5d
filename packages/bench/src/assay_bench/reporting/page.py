"""An HTML page of comparisons and tunings."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from assay.files import read_sealed_json, refuse_link, write_whole
from assay.output.pages import page_environment
from assay_bench.reporting.comparison_files import JSON_FILE
from assay_bench.reporting.pictures import HEIGHT, WIDTH, Interval, LossCurve
from assay_bench.tuning.records import read_tunings

_TEMPLATES = Path(__file__).with_name("templates")


def write_page(compared: Sequence[Path], tuned: Sequence[Path], file: Path) -> Path:
    """Write the page to `file` and return it.

    compared, tuned: output folders of `assay bench compare` and `assay bench tune`.
    Raises: UsageError for any other folder.
    """
    environment = page_environment(_TEMPLATES)
    comparisons = [_read_comparison(folder) for folder in compared]
    page = environment.get_template("bench.html.j2").render(
        comparisons=[(one, _intervals(one)) for one in comparisons],
        curves=[LossCurve.of(tuning) for folder in tuned for tuning in read_tunings(folder)],
        width=WIDTH,
        height=HEIGHT,
    )
    return write_whole(file, page)


def _read_comparison(folder: Path) -> dict[str, Any]:
    return read_sealed_json(refuse_link(folder / JSON_FILE))


def _intervals(comparison: dict[str, Any]) -> list[Interval]:
    return [
        Interval.of(task["name"], measure)
        for task in comparison["tasks"]
        for measure in task["measures"]
    ]
