"""One page of comparisons, tunings and speeds, for people."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.files import read_sealed_json, refuse_link, write_whole
from assay.output.pages import page_environment
from assay_bench.performance.history.database import read_series
from assay_bench.reporting.comparing import JSON_FILE
from assay_bench.reporting.pictures import HEIGHT, WIDTH, Curve, Interval
from assay_bench.tuning.records import read_tunings

_TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True, slots=True)
class PageSources:
    """What is shown: folders of `bench compare` and `bench tune`, and a history of speeds."""

    compared: Sequence[Path] = ()
    tuned: Sequence[Path] = ()
    history: Path | None = None


def write_page(sources: PageSources, file: Path) -> Path:
    """Write the page. Returns: the file.

    Raises: UsageError for a folder that holds no such thing.
    """
    environment = page_environment(_TEMPLATES)
    comparisons = [_read_comparison(folder) for folder in sources.compared]
    page = environment.get_template("bench.html.j2").render(
        comparisons=[(one, _intervals(one)) for one in comparisons],
        losses=[
            Curve.of_losses(tuning) for folder in sources.tuned for tuning in read_tunings(folder)
        ],
        speeds=[]
        if sources.history is None
        else list(map(Curve.of_series, read_series(sources.history))),
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
