"""One page of comparisons, tunings and speeds, for people."""

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
    """Write the page of folders of `bench compare` and `bench tune`. Returns: the file.

    Raises: UsageError for a folder that holds no such thing.
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
