"""Environments, turns and their comparison.

Intervals are computed by hand. n blocks have n (n + 1) / 2 averages of two, including each block with itself.
"""

import math
import random
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay.judge.levels import LevelResult
from assay.launch import ProcessError
from assay.output.console import open_console
from assay.runs import SilentProgress
from assay.verdicts import Outcome
from assay_bench.performance.records import SuiteRequest
from assay_bench.performance.running import (
    Block,
    compare_sides,
    comparison_table,
    find_stored,
    judge_suite,
    measure_environments,
    performance_table,
    ratio_interval,
    require_python,
)
from packages.bench.tests.unit.performance.sample_results import performance_result, suite_result


def blocks_of(pairs: list[tuple[float, float]]) -> list[Block]:
    run = performance_result()
    return [
        (
            run.model_copy(update={"suites": [suite_result([a, 9.0])]}),
            run.model_copy(update={"suites": [suite_result([9.0, b])]}),
        )
        for a, b in pairs
    ]


def judged(blocks: list[Block], suite: str = "prefill") -> LevelResult:
    return judge_suite(suite, blocks, 0.05, "--blocks 24")


def test_ratio_of_a_block_uses_the_fastest_rounds() -> None:
    found = judged(blocks_of([(1.0, 1.5), (2.0, 3.0)] * 3))
    assert [row.ratio for row in found.measurements] == [1.5] * 6
    assert [row.expected for row in found.measurements] == [1.0, 2.0] * 3
    assert found.is_failed


def test_contradicting_blocks_are_underpowered() -> None:
    level = judged(blocks_of([(1.0, 1.5), (1.5, 1.0)] * 3)).level
    assert level.reason == (
        "underpowered: 95% interval 0.667 to 1.500 contains the limit of 1.05; --blocks 24 halve it, and an idle"
        " machine can narrow it further"
    )


SLOWER, EQUAL, UNCLEAR = [1.5] * 6, [1.0] * 6, [1.0, 1.5] * 3


@pytest.mark.parametrize(
    ("prefill", "decode", "verdict", "headline"),
    [
        (EQUAL, EQUAL, "PASS", "Every suite of B takes less than 1.05 times as long as in A."),
        (SLOWER, UNCLEAR, "FAIL", "B takes more than 1.05 times as long as A in prefill."),
        (SLOWER, None, "FAIL", "B takes more than 1.05 times as long as A in prefill."),
        (
            UNCLEAR,
            EQUAL,
            "NOT_COMPARED",
            "underpowered: the intervals do not decide prefill.",
        ),
        (EQUAL, None, "NOT_COMPARED", None),
        (UNCLEAR, None, "NOT_COMPARED", None),
    ],
)
def test_pass_needs_every_suite_not_slower(
    prefill: list[float], decode: list[float] | None, verdict: str, headline: str | None
) -> None:
    run = performance_result()
    expected = [suite_result([1.0]), suite_result([1.0], "decode")]
    blocks = [
        (
            run.model_copy(update={"suites": expected}),
            run.model_copy(
                update={
                    "suites": [suite_result([ratio])]
                    + ([] if decode is None else [suite_result([decode[number]], "decode")])
                }
            ),
        )
        for number, ratio in enumerate(prefill)
    ]
    sides = [a for a, _ in blocks], [b for _, b in blocks]
    found, _ = compare_sides(
        sides, (Path("a"), Path("b")), suites=["prefill", "decode"], margin=0.05, took_turns=True
    )
    assert (found.verdict, found.headline, found.notes) == (verdict, headline, [])


def test_suite_skipped_by_one_side_is_not_compared_and_by_both_is_not_run() -> None:
    reason = "needs 2 devices"
    blocks = [
        (
            a.model_copy(
                update={
                    "skipped": {"capture": reason},
                    "suites": [*a.suites, suite_result(suite="decode")],
                }
            ),
            b.model_copy(update={"skipped": {"capture": reason, "decode": reason}}),
        )
        for a, b in blocks_of([(1.0, 1.0)] * 6)
    ]
    levels = {suite: judged(blocks, suite).level for suite in ("prefill", "decode", "capture")}
    assert {name: (one.verdict, one.reason) for name, one in levels.items()} == {
        "prefill": (Outcome.PASS, None),
        "decode": (Outcome.NOT_COMPARED, f"B: {reason}"),
        "capture": (None, f"A, B: {reason}"),
    }


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def measure(
    environments: tuple[Path, Path], request: SuiteRequest, num_blocks: int, folder: Path
) -> tuple[Path, Path]:
    return measure_environments(
        environments, request, num_blocks=num_blocks, folder=folder, progress=SilentProgress()
    )


# Stands for `assay bench perf` of an environment: notes its turn, and fails in the turn of FAIL.
PERF = """
for output; do :; done
name=$(basename $(dirname "$output"))/$(basename "$output")
echo "$name $PYTHONPATH$ASSAY_KEPT" >> {turns}
[ "$name" = "$(cat {fail})" ] && {{ echo "out of luck"; exit 3; }}
mkdir "$output" && touch "$output/performance.json"
"""


def test_two_environments_take_turns_and_an_interrupted_comparison_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("ASSAY_KEPT", "kept")
    turns, fail, folder = tmp_path / "turns", tmp_path / "fail", tmp_path / "run"
    folder.mkdir()
    fail.write_text("A/001")
    python = write_program(tmp_path / "bin/python", PERF.format(turns=turns, fail=fail))
    request = SuiteRequest(suites=["prefill"])
    with pytest.raises(ProcessError, match="out of luck"):
        measure((tmp_path, python), request, 2, folder)
    fail.write_text("")
    notes: list[str] = []
    monkeypatch.setattr(SilentProgress, "note", lambda _, text: notes.append(text))
    sides = measure((tmp_path, python), request, 2, folder)
    assert notes == ["more than 3 s: 1 run of 1 suite"]
    assert [len(find_stored(side)) for side in sides] == [2, 2]
    # Another environment does not inherit the import path.
    expected = ["A/000", "B/000", "B/001", "A/001", "A/001"]
    assert turns.read_text().splitlines() == [f"{turn} kept" for turn in expected]
    with pytest.raises(UsageError, match="holds a comparison of other environments, suites"):
        measure((tmp_path, python), request.model_copy(update={"run": "cpu/bfloat16"}), 2, folder)
    # More blocks continue the same comparison.
    measure((tmp_path, python), request, 3, folder)
    assert turns.read_text().split()[10:] == ["A/002", "kept", "B/002", "kept"]


def test_a_python_without_assay_bench_is_named(tmp_path: Path) -> None:
    program = write_program(tmp_path / "bin/python", f'exec "{sys.executable}" -I -S "$@"')
    with pytest.raises(ProcessError, match=r"(?s)bench perf of .*No module named .?assay"):
        measure((tmp_path, program), SuiteRequest(suites=["prefill"]), 6, tmp_path)


@pytest.mark.parametrize("name", ["absent", "empty", "file"])
def test_path_without_python_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("no program")
    with pytest.raises(UsageError, match=f"{name} is neither a folder with bin/python"):
        require_python(tmp_path / name)


def test_six_blocks_span_the_interval() -> None:
    # P(W+ = 0) = 1/64 < 0.025 <= P(W+ <= 1) = 2/64: no average is excluded.
    ratios = [1.01, 1.02, 1.04, 1.05, 1.08, 1.16]
    _, lower, upper = ratio_interval(ratios)
    assert lower == pytest.approx(1.01)
    assert upper == pytest.approx(1.16)


def test_eight_blocks_exclude_three_averages_at_each_end() -> None:
    # The tabulated critical value for n = 8 at a two-sided 0.05 is 3: P(W+ <= 3) = 5/256 = 0.0195,
    # P(W+ <= 4) = 7/256. Logs 0, 1, 2, 4, 8, ...: the averages begin 0, 0.5, 1, 1, 1.5.
    logs = [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]
    _, lower, upper = ratio_interval([math.exp(value / 100) for value in logs])
    assert lower == pytest.approx(math.exp(0.01))
    # From the top: 64, 48, 40, 36.
    assert upper == pytest.approx(math.exp(0.36))


def test_swapped_sides_invert_the_interval() -> None:
    ratios = [1.02, 0.98, 1.11, 1.07, 1.01, 1.05, 0.99]
    ratio, lower, upper = ratio_interval(ratios)
    inverse = ratio_interval([1 / ratio for ratio in ratios])
    assert inverse == pytest.approx((1 / ratio, 1 / upper, 1 / lower))


def test_equal_blocks_have_an_interval_of_width_zero() -> None:
    assert ratio_interval([1.25] * 6) == pytest.approx((1.25, 1.25, 1.25))


def test_five_blocks_are_too_few() -> None:
    with pytest.raises(
        UsageError, match="5 blocks are too few for an interval of 95% confidence; at"
    ):
        ratio_interval([1.0] * 5)


@pytest.mark.parametrize(
    ("interval", "outcome"),
    [
        ((1.06, 1.10), Outcome.FAIL),
        ((1.04, 1.06), Outcome.NOT_COMPARED),
        ((0.98, 1.20), Outcome.NOT_COMPARED),
        ((1.01, 1.04), Outcome.PASS),
        ((0.50, 0.60), Outcome.PASS),
    ],
)
def test_interval_must_be_on_one_side_of_the_margin(
    interval: tuple[float, float], outcome: Outcome
) -> None:
    # Six blocks span the interval.
    level = judged(blocks_of([(1.0, one) for one in interval] * 3)).level
    assert level.verdict is outcome


@pytest.mark.parametrize(
    ("ratios", "reads", "outcome"),
    [
        # The ratio 1.461 was recorded with READ 1.581 (1.167 to 2.030): the whole machine slowed.
        ((1.461,) * 6, (1.167, 1.45, 1.58, 1.60, 1.75, 2.030), None),
        # The machine sped up, which hides that B is slower.
        ((0.90, 0.95, 0.92, 0.96, 0.91, 0.94), (0.60, 0.75, 0.7, 0.65, 0.72, 0.68), None),
        # Beyond the change, and against it.
        ((3.1, 3.4, 3.2, 3.3, 3.6, 3.0), (1.2, 1.4, 1.3, 1.25, 1.35, 1.3), Outcome.FAIL),
        ((1.5, 1.4, 1.6, 1.5, 1.4, 1.5), (0.60, 0.75, 0.7, 0.65, 0.72, 0.68), Outcome.FAIL),
        ((0.4, 0.5, 0.45, 0.42, 0.48, 0.44), (0.60, 0.75, 0.7, 0.65, 0.72, 0.68), Outcome.PASS),
        ((0.9, 1.0, 0.95, 0.92, 0.98, 0.94), (1.2, 1.4, 1.3, 1.25, 1.35, 1.3), Outcome.PASS),
        # READ may be unchanged.
        ((1.4, 1.5, 1.45, 1.42, 1.48, 1.44), (0.8, 1.6, 1.5, 0.9, 1.4, 1.3), Outcome.FAIL),
    ],
)  # fmt: skip
def test_change_of_the_machine_is_not_one_of_the_suite(
    ratios: Sequence[float], reads: Sequence[float], outcome: Outcome | None
) -> None:
    run = performance_result()
    blocks = [
        (run.model_copy(update={"suites": [suite_result([1.0], read_seconds=[1.0])]}),
         run.model_copy(update={"suites": [suite_result([ratio], read_seconds=[read])]}))
        for ratio, read in zip(ratios, reads, strict=True)
    ]  # fmt: skip
    level = judged(blocks).level
    assert level.verdict is (outcome or Outcome.NOT_COMPARED)
    told = "is not beyond the change of the machine: READ B TO A"
    assert (told in str(level.reason)) == (outcome is None)


def test_interval_has_its_nominal_coverage() -> None:
    rng = random.Random(0)  # noqa: S311 - reproducible
    covered = 0
    for _ in range(200):
        blocks = [1.1 * math.exp(0.03 * rng.gauss(0, 1)) for _ in range(10)]
        _, lower, upper = ratio_interval(blocks)
        covered += lower <= 1.1 <= upper
    # Exactly 1 - 2 * 25/1024 = 95.1 %: of 200 between 91 % and 98.5 % with probability 0.99.
    assert 0.91 <= covered / 200 <= 0.985


def test_reasons_of_skipped_suites_do_not_widen_the_tables() -> None:
    skipped = dict.fromkeys(["collectives", "decode"], "needs two devices " * 40)
    one = performance_result().model_copy(update={"skipped": skipped})
    other = one.model_copy(update={"suites": [*one.suites, suite_result(suite="decode")]})
    verdict, _ = compare_sides(
        ([one], [other]),
        (Path("a"), Path("b")),
        suites=["prefill", "decode", "collectives"],
        margin=0.05,
        took_turns=False,
    )
    lines: list[str] = []
    for table in (performance_table(one), comparison_table(verdict)):
        stream = StringIO()
        open_console(stream, width=200).print(table)
        lines = [line.rstrip() for line in stream.getvalue().splitlines()]
        assert max(map(len, lines)) < 80
        assert "collectives" in stream.getvalue()
    assert [line.split() for line in lines if line][1:] == [
        ["prefill", "1.000", "1.000", "underpowered"],
        ["decode", "not", "compared"],
        ["collectives", "not", "run"],
    ]
