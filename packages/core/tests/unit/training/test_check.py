from pathlib import Path
from typing import Any, get_args

import pytest

from assay.errors import UsageError
from assay.judge.limits import load_limits
from assay.models.config_files import record_settings
from assay.runs import SilentProgress, provenance
from assay.statistics import METRICS, Statistic
from assay.training import check as checking
from assay.training.check import check_train, load_training_limits
from assay.training.overfit.check import check_overfit, overfit_options
from assay.training.reports import RecordedPlan, TrainCheck, TrainOptions
from assay.verdicts import Outcome

CPU = "cpu/float32"


def test_limits_of_training_cover_every_statistic_and_are_no_tighter_than_the_forward_pass() -> (
    None
):
    limits, forward = load_training_limits("training"), load_limits()

    of_expectations = {"logits-whole", "output-whole"}
    for statistic in set(get_args(Statistic)) - of_expectations - METRICS:
        assert limits.of(statistic) >= 0
    assert all(limits.by_statistic[name] >= limit for name, limit in forward.by_statistic.items())
    assert limits.origin.startswith("calibrated on ")


@pytest.mark.parametrize(
    ("options", "check", "message"),
    [
        ({"steps": 0}, {}, "--steps 0"),
        ({"resume_at": 3}, {}, "--resume-at 3: .* after 1 to 2 of them"),
        ({"resume_at": 0}, {}, "--resume-at 0"),
        ({"micro_batches": 0}, {}, "--micro-batches=0: must"),
        ({}, {"candidate": "absent/float32"}, "absent"),
        ({}, {"candidate": "cpu/int4"}, "int4"),
        ({}, {"candidate": "cpu/float16"}, "float16 has no eps of 1e-08.*use --mixed-precision"),
        ({}, {"trainer": "absent.py:Mine"}, "there is no file"),
        ({}, {"setup": "absent.py:plant"}, "there is no file"),
        ({}, {"setup": f"{__file__}:nope"}, "unknown function 'nope'"),
        ({}, {"limits": "absent"}, "no limits called 'absent'"),
        (
            {"micro_batches": 4},
            {"mesh": {"dp": 3}},
            "3 ranks of dp cannot share out 4 micro-batches",
        ),
        (
            {},
            {"mesh": {"dp": 2, "pp": 2}},
            "2 stages on each of 2 ranks of dp need at least 4",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_nonsense_is_refused_before_anything_runs(
    tmp_path: Path, options: dict[str, int | str], check: dict[str, Any], message: str
) -> None:
    asked = TrainCheck(
        TrainOptions.model_validate({"model": "micro:llama"} | options),
        **{"reference": CPU, "candidate": CPU} | check,
    )

    with pytest.raises(UsageError, match=message):
        check_train(asked, tmp_path, SilentProgress())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("steps", "rate", "tracker", "message"),
    [
        (9, None, None, "--overfit-steps 9: .* fewer than 10"),
        (None, -1.0, None, "--learning-rate -1.0"),
        (None, None, "excel", "--track excel"),
    ],
)
def test_overfitting_that_cannot_be_is_refused_before_anything_runs(
    tmp_path: Path, steps: int | None, rate: float | None, tracker: str | None, message: str
) -> None:
    options = overfit_options(TrainOptions(model="micro:llama"), steps, rate)

    with pytest.raises(UsageError, match=message):
        check_overfit(TrainCheck(options, CPU, CPU), tmp_path, SilentProgress(), tracker)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("outcome", [Outcome.PASS, Outcome.FAIL])
def test_changed_settings_of_the_model_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: Outcome
) -> None:
    settings = record_settings("micro:llama") | {"config.json: rope_parameters.rope_theta": 5.0}
    options = TrainOptions(model="micro:llama")
    plan = RecordedPlan(
        options=options, dtype="float32", reference=CPU, environment=provenance(), settings=settings
    )
    monkeypatch.setattr(checking, "read_plan", lambda _: plan)
    check = TrainCheck(options, CPU, CPU)
    assert [*checking._explain_age(outcome, check, tmp_path, tmp_path, SilentProgress())] == [
        (
            "changed since the golden: config.json: rope_parameters.rope_theta 5.0 → 10000.0. Restore the file; if the"
            f" change is intended, record a golden here: --reference {CPU}"
        )
    ]
