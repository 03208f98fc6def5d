"""Compares stored results of `assay bench perf`, such as before and after a change, or in two dtypes.

Each run is one process, and a process keeps some properties for life. So an interval needs several runs of both sides:
the n-th run of A and the n-th of B form a block. They are independent, so that any pairing is valid, but they ran at
different times: a change of the machine between them is a part of the ratio. The read control shows a large one.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from assay.errors import UsageError
from assay.files import file_digest, read_json_object, read_sealed, write_whole
from assay.runs import provenance
from assay.runs.folders import MARK
from assay_bench.performance.records import RESULT_FILE, PerformanceResult, SuiteResult
from assay_bench.performance.running import (
    COMPARISON_FILE,
    MIN_BLOCKS,
    SIDES,
    Block,
    EnvironmentComparison,
    SuiteComparison,
    compare_suite,
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
    folder: Path,
) -> EnvironmentComparison:
    """Compare the runs of both sides, judge if a suite of B is slower, and write ab.json into `folder`.

    suites: those to compare, of which each may be absent.
    With fewer than 6 runs of each side, every suite is underpowered.
    Raises: UsageError for another machine or model.
    """
    first, second = sides[0][0], sides[1][0]
    _require_alike((first, second), ("machine", "model"), f"{paths[0]} and {paths[1]}")
    blocks = [
        Block(
            expected=a.suites, actual=b.suites, skipped={"A": dict(a.skipped), "B": dict(b.skipped)}
        )
        for a, b in zip(*sides, strict=False)
    ]
    compared: list[SuiteComparison] = []
    missing: dict[str, str] = {}
    for suite in suites:
        lists = ([block.expected for block in blocks], [block.actual for block in blocks])
        has = [all(_has(suite, results) for results in side) for side in lists]
        if all(has):
            compared.append(_compare(suite, blocks, margin))
        elif any(_has(suite, results) for side in lists for results in side):
            without = [side for side, is_there in zip(SIDES, has, strict=True) if not is_there]
            missing[suite] = f"not every run of {' and '.join(without)} measured it"
    runs = [side[0].run for side in sides]
    result = EnvironmentComparison(
        margin=margin,
        suites=compared,
        not_compared=missing,
        skipped={
            suite: reason
            for suite, reason in first.skipped.items()
            if suite in second.skipped and suite in suites and suite not in missing
        },
        environments={
            side: {"name": str(path), "run": one.run, "versions": one.versions}
            for side, path, one in zip(SIDES, paths, (first, second), strict=True)
        },
        run=" and ".join(dict.fromkeys(runs)),
        model=first.model,
        blocks=blocks,
        took_turns=False,
        provenance=provenance(),
    )
    write_whole(folder / COMPARISON_FILE, result.to_json())
    return result


def _has(suite: str, results: Sequence[SuiteResult]) -> bool:
    return any(one.suite == suite for one in results)


def _compare(suite: str, blocks: Sequence[Block], margin: float) -> SuiteComparison:
    pairs = [
        (one, other)
        for block in blocks
        for one in block.expected
        for other in block.actual
        if one.suite == other.suite == suite
    ]
    control = median(min(b.read_seconds) / min(a.read_seconds) for a, b in pairs)
    if len(blocks) >= MIN_BLOCKS:
        found = compare_suite(suite, blocks, margin)
        return found.model_copy(update={"control_ratio": control})
    ratios = [b.fastest / a.fastest for a, b in pairs]
    return SuiteComparison(
        suite=suite, speed="underpowered", ratio=median(ratios), lower=None, upper=None,
        block_ratios=ratios, control_ratio=control,
    )  # fmt: skip
