"""The settings of AdamW that a plan states for each parameter and step."""

import pytest
import torch

from assay.errors import UsageError
from assay.training.protocol import ADAMW_SETTINGS, TrainingPlan
from assay.training.reports import TrainOptions
from assay.training.trainers.registry import stated_plan_of

PLAN = TrainingPlan(
    "micro:llama",
    "cpu/float32",
    learning_rate=1e-2,
    learning_rate_factors=(0.5, 1.0),
    parameter_groups={
        "*norm*": {"weight_decay": 0.0},
        "model.*": {"weight_decay": 0.1, "lr": 0.1, "betas": (0.9, 0.95)},
    },
)


def test_defaults_are_those_of_torch() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])

    assert {name: optimizer.defaults[name] for name in ADAMW_SETTINGS} == dict(ADAMW_SETTINGS)


@pytest.mark.parametrize(
    ("parameter", "changed"),
    [
        ("model.norm.weight", {"weight_decay": 0.0, "lr": 0.1, "betas": (0.9, 0.95)}),
        ("model.embed_tokens.weight", {"weight_decay": 0.1, "lr": 0.1, "betas": (0.9, 0.95)}),
        ("lm_head.weight", {}),
    ],
)
def test_first_glob_with_a_setting_counts(parameter: str, changed: dict[str, object]) -> None:
    defaults = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}

    assert PLAN.settings_of(parameter, 1) == defaults | changed


@pytest.mark.parametrize(("step", "rate"), [(0, 0.005), (1, 0.01), (5, 0.01)])
def test_last_factor_holds_for_all_later_steps(step: int, rate: float) -> None:
    assert PLAN.settings_of("lm_head.weight", step)["lr"] == pytest.approx(rate)
    assert PLAN.settings_of("model.embed_tokens.weight", step)["lr"] == pytest.approx(10 * rate)


def test_options_of_both_sides_carry_the_stated_plan() -> None:
    stated = {"learning_rate_factors": (0.5, 1.0), "max_grad_norm": float("inf")}
    options = TrainOptions.model_validate({"model": "micro:llama"} | stated)
    read = TrainOptions.model_validate_json(options.model_dump_json())

    assert read.plan("cpu/float32").learning_rate_factors == (0.5, 1.0)
    assert read.plan("cpu/float32").max_grad_norm == float("inf")


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"learning_rate": 1.0}, "with the keys: frozen, learning_rate_factors, max_grad_norm"),
        ({"parameter_groups": {"*": {"momentum": 0.9}}}, "parameter_groups have momentum"),
    ],
)
def test_other_fields_are_refused(
    monkeypatch: pytest.MonkeyPatch, stated: dict[str, object], message: str
) -> None:
    from assay.training.trainers.reference import ReferenceTrainer

    monkeypatch.setattr(ReferenceTrainer, "stated_plan", stated, raising=False)
    with pytest.raises(UsageError, match=message.replace("*", ".")):
        stated_plan_of("reference")
