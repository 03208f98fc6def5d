from pathlib import Path
from typing import get_args

import pytest

from assay.comparing.limits import Limits, load_limits, shipped_limits
from assay.errors import UsageError
from assay.statistics import METRICS, Statistic

WHOLE = "origin = 'here'\n[limits]\nreplay-tensor = 2\n"


@pytest.fixture
def limits_file(tmp_path: Path) -> Path:
    return tmp_path / "mine.toml"


def test_shipped_limits_cover_every_statistic() -> None:
    limits = load_limits()

    of_others = {"loss-error", "trajectory-error", "logits-whole"}  # training and expectations
    for statistic in set(get_args(Statistic)) - of_others - METRICS:
        assert limits.of(statistic) >= 0


def test_what_must_be_exact_has_the_limit_zero_whatever_a_file_says() -> None:
    limits = Limits("x", "y", {"exact": 5.0, "non-finite": 5.0})

    assert (limits.of("exact"), limits.of("non-finite")) == (0.0, 0.0)


def test_limits_of_a_file_describe_place_they_come_from(limits_file: Path) -> None:
    limits_file.write_text(WHOLE)

    limits = load_limits(str(limits_file))

    assert limits.of("replay-tensor") == 2.0
    assert (limits.name, limits.origin) == (str(limits_file), "here")


def test_statistic_without_a_limit_is_an_error_and_never_a_pass(limits_file: Path) -> None:
    limits_file.write_text(WHOLE)

    with pytest.raises(UsageError, match="have none for replay-row"):
        load_limits(str(limits_file)).of("replay-row")


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
def test_file_by_which_nothing_could_be_judged_is_refused(limits_file: Path, text: str) -> None:
    limits_file.write_text(text)

    with pytest.raises(UsageError, match=r"mine\.toml: "):
        load_limits(str(limits_file))


def test_file_that_is_no_text_is_refused(limits_file: Path) -> None:
    limits_file.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(UsageError, match=r"mine\.toml: not UTF-8"):
        load_limits(str(limits_file))


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
def test_a_limit_by_dtype_is_checked(limits_file: Path, limit: str, problem: str) -> None:
    limits_file.write_text(f"origin = 'here'\n[limits]\nkl-divergence = {limit}\n")

    with pytest.raises(UsageError, match=problem):
        load_limits(str(limits_file), "float16")
