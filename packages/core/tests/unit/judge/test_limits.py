"""Limits, and their calibration on clean runs."""

import tomllib
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from assay.errors import UsageError
from assay.judge.limits import (
    FAILURE_RATE,
    PUBLISHED_METRICS,
    CleanRun,
    CleanTokens,
    DerivedLimit,
    Limits,
    calibrate_limits,
    calibrate_thresholds,
    limits_file,
    load_limits,
    passing_value,
    published_pair,
    read_clean_tokens,
    shipped_limits,
    thresholds_file,
)
from assay.statistics import METRICS, OF_STAGES, Statistic
from assay.training.check import load_training_limits
from assay.verdicts import Measurement
from packages.core.tests.unit.report.sample_runs import Sample, write_sample

WHOLE = "origin = 'here'\n[limits]\nreplay-tensor = 2\n"


@pytest.fixture
def limits_path(tmp_path: Path) -> Path:
    return tmp_path / "mine.toml"


def test_shipped_limits_cover_every_statistic() -> None:
    limits = load_training_limits("training")  # those of generation as well

    for statistic in (
        set(get_args(Statistic)) - METRICS - {"logits-whole", "output-whole"}
    ):  # of expectations
        assert limits.of(statistic) >= 0
    for statistic in OF_STAGES:
        assert load_limits().of(statistic) > 0


def test_what_must_be_exact_has_the_limit_zero_whatever_a_file_says() -> None:
    limits = Limits("x", "y", {"exact": 5.0, "non-finite": 5.0})

    assert (limits.of("exact"), limits.of("non-finite")) == (0.0, 0.0)


def test_limits_of_a_file_describe_place_they_come_from(limits_path: Path) -> None:
    limits_path.write_text(WHOLE)

    limits = load_limits(str(limits_path))

    assert limits.of("replay-tensor") == 2.0
    assert (limits.name, limits.origin) == (str(limits_path), "here")


def test_statistic_without_a_limit_is_an_error_and_never_a_pass(limits_path: Path) -> None:
    limits_path.write_text(WHOLE)

    with pytest.raises(UsageError, match="have none for replay-row"):
        load_limits(str(limits_path)).of("replay-row")


def test_every_shipped_file_can_be_read() -> None:
    assert "noise" in shipped_limits()
    for name in shipped_limits():
        assert load_limits(name).origin


def test_unknown_name_lists_those_that_are_shipped() -> None:
    with pytest.raises(UsageError, match=r"no limits called 'strict'; shipped: .*noise"):
        load_limits("strict")


def test_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.toml: cannot be read: No such file"):
        load_limits(str(tmp_path / "absent.toml"))


@pytest.mark.parametrize(
    "text",
    [
        "not toml",
        "[limits]\nreplay-tensor = 2\n",
        "origin = 'x'\n",
        "origin = 'x'\nlimits = 3\n",
        "origin = 'x'\n[limits]\nreplay-tensor = 'high'\n",
        "origin = 'x'\n[limits]\nreplay-tensor = nan\n",
        "origin = 'x'\n[limits]\nreplay-tensor = inf\n",
        "origin = 'x'\n[limits]\nreplay-tensor = 0\n",
        "origin = 'x'\n[limits]\nreplay-tensor = -1\n",
        "origin = 'x'\n[limits]\nreplay-tenser = 3\n",
    ],
    ids=["syntax", "no origin", "no limits", "limits no table", "text", "nan", "inf", "zero",
         "negative", "misspelt"],
)  # fmt: skip
def test_file_by_which_nothing_could_be_judged_is_refused(limits_path: Path, text: str) -> None:
    limits_path.write_text(text)

    with pytest.raises(UsageError, match=r"mine\.toml: "):
        load_limits(str(limits_path))


def test_file_that_is_no_text_is_refused(limits_path: Path) -> None:
    limits_path.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(UsageError, match=r"mine\.toml: not UTF-8"):
        load_limits(str(limits_path))


def test_a_limit_that_no_float_holds_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(f"origin = 'a'\n[limits]\nreplay-tensor = 1{'0' * 400}\n")
    with pytest.raises(UsageError, match="not a positive number"):
        load_limits(str(tmp_path / "x.toml"))


@pytest.mark.parametrize(
    ("dtype", "expected"), [("bfloat16", 0.005), ("float16", 0.0001), ("float32", None)]
)
def test_published_limits_depend_on_the_dtype(dtype: str, expected: float | None) -> None:
    limits = load_limits("ascend", dtype)

    assert limits.by_statistic.get("kl-divergence") == expected
    assert limits.of("cosine-distance") == 0.001
    assert (limits.names_metrics, limits.names_noise_ratios) == (True, False)


def test_limits_of_noise_ratios_name_no_metric() -> None:
    limits = load_limits()

    assert (limits.names_metrics, limits.names_noise_ratios) == (False, True)


def test_limits_of_metrics_judge_no_noise_ratio() -> None:
    with pytest.raises(UsageError, match="limits 'ascend' have none for replay-tensor"):
        load_limits("ascend").of("replay-tensor")


@pytest.mark.parametrize(
    ("limit", "problem"),
    [
        ("{bf16 = 1.0}", "kl-divergence is for an unknown dtype 'bf16'"),
        ("{float16 = 0.0}", "the limit of kl-divergence is not a positive number: 0.0"),
        ("{bfloat16 = 1.0}", "no limit is for float16"),
    ],
)
def test_a_limit_by_dtype_is_checked(limits_path: Path, limit: str, problem: str) -> None:
    limits_path.write_text(f"origin = 'here'\n[limits]\nkl-divergence = {limit}\n")

    with pytest.raises(UsageError, match=problem):
        load_limits(str(limits_path), "float16")


RUNS = [
    CleanRun("one", {"replay-row": 4.0, "loss-error": 2.0}),
    CleanRun("other", {"replay-row": 3.0, "loss-error": 40.0}),
]


def test_limit_is_the_margin_times_the_largest_ratio_of_all_runs() -> None:
    assert calibrate_limits(RUNS) == {"loss-error": 50.0, "replay-row": 5.0}


@pytest.mark.parametrize(("derived", "limit"), [(60.0, 60.0), (20.0, 50.0)])
def test_derived_limit_is_widened_by_runs_and_never_narrowed(
    tmp_path: Path, derived: float, limit: float
) -> None:
    file = tmp_path / "limits.toml"

    file.write_text(limits_file(RUNS, "here", {"loss-error": DerivedLimit(derived, "Of F(3, 3).")}))

    limits = load_limits(str(file))
    assert limits.by_statistic == {"loss-error": limit, "replay-row": 5.0}
    assert f"# loss-error, at least {derived}: Of F(3, 3).\n" in file.read_text()


def test_derived_limit_needs_no_run_that_has_the_statistic(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    runs = [CleanRun("one", {"replay-row": 4.0})]

    file.write_text(limits_file(runs, "here", {"loss-error": DerivedLimit(20.0, "A reason.")}))

    assert load_limits(str(file)).by_statistic == {"loss-error": 20.0, "replay-row": 5.0}


def test_file_names_every_run_with_its_ratios() -> None:
    data = tomllib.loads(limits_file(RUNS, "here"))

    assert data["runs"] == {run.name: dict(run.ratios) for run in RUNS}
    assert data["origin"] == "calibrated on 2 clean runs"


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


def test_run_that_fails_is_no_clean_run(tmp_path: Path) -> None:
    write_sample(tmp_path, Sample())
    with pytest.raises(UsageError, match=f"{tmp_path} is FAIL: no clean run"):
        read_clean_tokens(tmp_path / "measurements.jsonl")


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
