"""Compares stored results of `assay bench perf`, such as of two environments, before and after a change, or in two dtypes.

Each run is one process, and a process keeps some properties for life. So an interval needs several runs of both sides:
the n-th run of A and the n-th of B form a block. They are independent, so that any pairing is valid, but they ran at
different times: a change of the machine between them is a part of the ratio. The read control shows a large one.
"""

from collections.abc import Sequence
from pathlib import Path

from assay.errors import UsageError
from assay.files import file_digest, read_json_object, read_sealed, write_sealed
from assay.runs import provenance
from assay.runs.folders import MARK
from assay_bench.performance.records import RESULT_FILE, PerformanceResult
from assay_bench.performance.running import (
    COMPARISON_FILE,
    SIDES,
    EnvironmentComparison,
    compare_blocks,
)


def find_stored(path: Path) -> list[Path]:
    """Return performance.json of a run's folder, or of the runs in a folder; an empty list for anything else."""
    own = path / RESULT_FILE
    return [own] if own.is_file() else sorted(path.glob(f"*/{RESULT_FILE}"))


# The commands that read the folders of others; `report` reads any verdict.
_READERS = {"bench run": "bench compare", "capture": "inspect"}


def refuse_other_run(path: Path) -> None:
    """Raise UsageError for a folder, or a folder of folders, that another command than `perf` wrote."""
    marks = [path / MARK, *sorted(path.glob(f"*/{MARK}"))]
    mark = next((one for one in marks if one.is_file()), None)
    if mark is None or find_stored(path):
        return
    command = str(read_json_object(mark).get("run"))
    if command == "bench perf":
        raise UsageError(
            f"{mark.parent} holds an unfinished run of `assay bench perf`: measure again"
        )
    raise UsageError(
        f"{mark.parent} holds a run of `assay {command}`, which `assay {_READERS.get(command, 'report')}` reads;"
        " `ab` compares environments, or folders of `assay bench perf`"
    )


def read_sides(
    first: Path, second: Path
) -> tuple[list[PerformanceResult], list[PerformanceResult]]:
    """Read the runs of both sides, each in the order of their dates.

    Raises: UsageError if the runs of a side measured different things, or a run is there twice.
    """
    if first.resolve() == second.resolve():
        raise UsageError(f"{first} is both A and B: measure B with `assay bench perf`")
    known: dict[str, Path] = {}
    for file in (*find_stored(first), *find_stored(second)):
        original = known.setdefault(file_digest(file), file)
        if original is not file:
            raise UsageError(
                f"{file.parent} is a copy of {original.parent}, and an interval needs independent processes:"
                " remove it, or measure again with `assay bench perf`"
            )
    return _read_side(first), _read_side(second)


def _read_side(path: Path) -> list[PerformanceResult]:
    results = [read_sealed(PerformanceResult, file) for file in find_stored(path)]
    if not results:
        raise UsageError(f"{path} holds no {RESULT_FILE} of `assay bench perf`")
    _require_alike(results, ("machine", "model", "run", "versions"), str(path))
    return sorted(results, key=lambda one: str(one.provenance.get("date", "")))


def _require_alike(results: Sequence[PerformanceResult], names: Sequence[str], where: str) -> None:
    for name in names:
        values = {str(getattr(one, name)): None for one in results}
        if len(values) > 1:
            raise UsageError(f"{where}: not comparable, different {name}: {'; '.join(values)}")


def compare_stored(
    sides: tuple[list[PerformanceResult], list[PerformanceResult]],
    paths: tuple[Path, Path],
    *,
    suites: Sequence[str],
    margin: float,
    took_turns: bool,
    folder: Path,
) -> EnvironmentComparison:
    """Compare the runs of both sides, judge if a suite of B is slower, and write ab.json into `folder`.

    paths: names of the sides. suites: those to compare, of which each may be absent.
    With fewer than 6 runs of each side, every suite is underpowered.
    Raises: UsageError for another machine or model.
    """
    first, second = sides[0][0], sides[1][0]
    _require_alike((first, second), ("machine", "model"), f"{paths[0]} and {paths[1]}")
    known = {
        name
        for run in (*sides[0], *sides[1])
        for name in (*(one.suite for one in run.suites), *run.skipped)
    }
    asked = [suite for suite in suites if suite in known]
    blocks = [*zip(*sides, strict=False)]
    compared, not_compared, skipped = compare_blocks(blocks, asked, margin)
    runs = [side[0].run for side in sides]
    result = EnvironmentComparison(
        margin=margin,
        suites=compared,
        not_compared=not_compared,
        skipped=skipped,
        environments={
            side: {"name": str(path), "run": one.run, "versions": one.versions}
            for side, path, one in zip(SIDES, paths, (first, second), strict=True)
        },
        run=" and ".join(dict.fromkeys(runs)),
        model=first.model,
        num_blocks=len(blocks),
        took_turns=took_turns,
        provenance=provenance(),
    )
    write_sealed(folder / COMPARISON_FILE, result)
    return result
