"""Evaluations that become baselines, with and without a reason."""

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay.files import read_sealed, seal
from assay_bench import comparison_files
from assay_bench.comparing import Terms
from assay_bench.comparison_files import Baseline, accept, is_baseline, read_sides
from assay_bench.results import Evaluation
from packages.bench.tests.unit.sample_evaluations import answered, evaluation, item, task

TERMS = Terms(accuracy=0.02)


def write(found: Evaluation, path: Path, reason: str | None = None) -> Path:
    return accept(found, path, TERMS, by="A. Lovelace", reason=reason)


def test_baseline_round_trips_without_texts(tmp_path: Path) -> None:
    given = evaluation(
        task([item(n, right=n % 2 == 0, log_probability=-n / 7, cluster="c") for n in range(9)])
    )
    path = write(given, tmp_path / "new" / "b.json", "the first")
    assert is_baseline(path)
    baseline = read_sealed(Baseline, path)
    assert (baseline.acceptance.by, baseline.acceptance.reason) == ("A. Lovelace", "the first")
    (kept,), (was,) = baseline.evaluation().tasks.values(), given.tasks.values()
    texts = {"question": "", "target": "", "answer": ""}
    assert kept == replace(was, items=tuple(replace(one, **texts) for one in was.items))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (400, 380, "is not shown to be as good (sums: FAIL)"),
        (400, 396, "shown to be as good (sums: underpowered: too few items to decide)"),
        (360, 390, "suspiciously good: sums acc improved by 0.075"),
    ],
)
def test_surprising_result_needs_a_reason(tmp_path: Path, before: int, now: int, told: str) -> None:
    path = write(evaluation(answered(before, 400)), tmp_path / "b.json")
    text = path.read_text()
    with pytest.raises(UsageError) as raised:
        write(evaluation(answered(now, 400)), path)
    assert told in str(raised.value)
    assert path.read_text() == text
    write(evaluation(answered(now, 400)), path, "more data")
    assert read_sealed(Baseline, path).acceptance.reason == "more data"


def test_surprising_task_among_others_needs_a_reason(tmp_path: Path) -> None:
    # Nine of nine changed answers are better: p = 0.2 %, and 1.2 % corrected for six tasks.
    same = [replace(answered(390, 400), name=f"same {n}") for n in range(5)]
    path = write(evaluation(*same, answered(390, 400)), tmp_path / "b.json")
    with pytest.raises(UsageError, match=r"suspiciously good: sums acc improved by 0\.0225"):
        write(evaluation(*same, answered(399, 400)), path)


def test_equally_good_result_replaces_without_a_reason(tmp_path: Path) -> None:
    path = write(evaluation(answered(390, 400)), tmp_path / "b.json")
    write(evaluation(answered(390, 400), name="newer"), path)
    assert read_sealed(Baseline, path).name == "newer"


def test_different_questions_need_a_reason(tmp_path: Path) -> None:
    path = write(evaluation(answered(390, 400)), tmp_path / "b.json")
    other = replace(answered(390, 400), asked={"version": 9})
    with pytest.raises(
        UsageError, match=r"\(sums: the two sides answered different questions: .*version is 9"
    ):
        write(evaluation(other), path)


def test_nan_is_refused_in_spite_of_a_reason(tmp_path: Path) -> None:
    wrong = evaluation(task([item(0, log_probability=math.nan)]))
    with pytest.raises(
        UsageError,
        match="this evaluation cannot be a baseline: sums: NaN or infinite: 1 of 1 log-prob",
    ):
        write(wrong, tmp_path / "b.json", "please")
    assert not (tmp_path / "b.json").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not JSON"),
        (seal({"baseline": 1}), "name: it is missing"),
        (seal({"baseline": 7}), "baseline: it must"),
        ('{"baseline": 1}', "it has no digest"),
    ],
)
def test_damaged_baseline_is_an_error(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=told):
        read_sealed(Baseline, path)


def test_a_baseline_that_would_take_long_to_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(evaluation(answered(390, 400)), tmp_path / "b.json")
    monkeypatch.setattr(comparison_files, "_MAX_BASELINE_BYTES", 1 << 14)
    with pytest.raises(UsageError, match=r"b\.json: it is larger than 16 KiB"):
        read_sides(path, path, {})
    with pytest.raises(UsageError, match="too large for a baseline: 0 MiB of at most"):
        write(evaluation(answered(390, 400)), tmp_path / "c.json")
    assert not (tmp_path / "c.json").exists()


@pytest.mark.parametrize("seed", range(20))
def test_one_changed_digit_of_a_baseline_is_refused(tmp_path: Path, seed: int) -> None:
    path = write(evaluation(answered(390, 400)), tmp_path / "b.json")
    text = path.read_text()
    places = [place for place, letter in enumerate(text) if letter.isdigit()]
    place = random.Random(seed).choice(places)  # noqa: S311 - reproducible
    path.write_text(f"{text[:place]}{(int(text[place]) + 1) % 10}{text[place + 1 :]}")
    with pytest.raises(UsageError):
        read_sealed(Baseline, path)
