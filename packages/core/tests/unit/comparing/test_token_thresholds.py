"""Thresholds that clean runs pass, by a stated probability."""

import tomllib
from pathlib import Path

import numpy as np
import pytest

from assay.comparing.token_thresholds import (
    FAILURE_RATE,
    PUBLISHED_METRICS,
    CleanTokens,
    calibrate_thresholds,
    passing_value,
    published_pair,
    read_clean_tokens,
    thresholds_file,
)
from assay.errors import UsageError
from assay.verdicts import Measurement

NUM_TOKENS = 1024


def clean_run(seed: int) -> CleanTokens:
    """Values of a long tail, at another level in each run: prompts are not equally hard."""
    random = np.random.default_rng(seed)
    level = random.lognormal(0.0, 0.2)
    values = (level * random.lognormal(0.0, 1.0, NUM_TOKENS)).tolist()
    return CleanTokens(f"seed-{seed}", dict.fromkeys(PUBLISHED_METRICS, values))


def fails(run: CleanTokens, threshold: float) -> bool:
    """As the published test decides."""
    values = run.values["diff_mean"]
    return sum(value >= threshold for value in values) / len(values) >= FAILURE_RATE


def test_calibration_runs_pass_and_by_the_published_percentile_do_not() -> None:
    runs = [clean_run(seed) for seed in range(20)]
    published = float(
        np.percentile([value for run in runs for value in run.values["diff_mean"]], 99)
    )

    assert sum(fails(run, published) for run in runs) > 5
    assert not any(fails(run, calibrate_thresholds(runs)["diff_mean"]) for run in runs)


def test_new_runs_fail_no_more_often_than_is_stated() -> None:
    threshold = calibrate_thresholds([clean_run(seed) for seed in range(30)])["diff_mean"]
    failed = sum(fails(clean_run(seed), threshold) for seed in range(1000, 1400))
    assert failed / 400 < 3 / 30
    # And it is no threshold that nothing can fail.
    twice = CleanTokens("", {"diff_mean": [2 * v for v in clean_run(2).values["diff_mean"]]})
    assert fails(twice, threshold / 1.25)


@pytest.mark.parametrize(("num_tokens", "expected"), [(100, 99.0), (101, 99.0), (300, 297.0)])
def test_run_passes_above_its_value_and_fails_at_it(num_tokens: int, expected: float) -> None:
    values = [float(number) for number in range(num_tokens)]
    needed = passing_value(values, FAILURE_RATE)
    run = CleanTokens("", {"diff_mean": values})

    assert needed == expected
    assert fails(run, needed)
    assert not fails(run, np.nextafter(needed, np.inf))


def write_metrics(file: Path, value: float) -> Path:
    rows = [
        Measurement(
            level="logits", module="", port="output.logits", statistic=name, actual=value,
            expected=value, ratio=1.0, prompt=0, position=position,
        ).model_dump_json()
        for name in PUBLISHED_METRICS
        for position in range(8)
    ]  # fmt: skip
    file.write_text("\n".join(rows) + "\n")
    return file


def test_file_states_thresholds_and_what_each_run_needs(tmp_path: Path) -> None:
    runs = [
        read_clean_tokens(write_metrics(tmp_path / f"{name}.jsonl", value))
        for name, value in (("one", 0.4), ("other", 0.8))
    ]
    data = tomllib.loads(thresholds_file(runs, "here"))

    assert data["thresholds"] == dict.fromkeys(PUBLISHED_METRICS, 1.0)
    assert data["runs"][str(tmp_path / "one.jsonl")] == {
        "tokens": 8,
        **dict.fromkeys(PUBLISHED_METRICS, 0.4),
    }
    assert data["false_failure_bound"] == 1.0
    pair = published_pair(calibrate_thresholds(runs))
    assert pair == "FMS_TEST_SHAPES_METRICS_THRESHOLD=1,1"


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{", "Invalid JSON"), ("", "there is no token with cross_entropy")],
)
def test_file_without_metrics_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(text)
    with pytest.raises(UsageError, match=problem):
        read_clean_tokens(file)


def test_run_with_nan_is_no_clean_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cross_entropy is not finite at a token: no clean run"):
        read_clean_tokens(write_metrics(tmp_path / "metrics.jsonl", float("nan")))


def test_exact_metrics_have_a_threshold_that_they_pass() -> None:
    exact = CleanTokens("exact", dict.fromkeys(PUBLISHED_METRICS, [0.0] * NUM_TOKENS))
    thresholds = calibrate_thresholds([exact])
    assert not fails(exact, thresholds["diff_mean"])
    assert all(value > 0 for value in thresholds.values())


def test_the_same_metrics_twice_are_no_two_runs() -> None:
    with pytest.raises(UsageError, match="seed-1 and seed-1 are the same metrics"):
        calibrate_thresholds([clean_run(1), clean_run(2), clean_run(1)])
