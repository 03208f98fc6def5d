"""A training plan as DeepSpeed's configuration."""

from typing import Any

import pytest

from assay.errors import UsageError
from assay.training.protocol import TrainingPlan
from assay_smoke.trainers.deepspeed.trainer import deepspeed_config


def config_of(
    run: str = "cpu/float32", *features: str, stage: int = 2, **plan: Any
) -> dict[str, Any]:
    planned = TrainingPlan("micro:llama", run, features=frozenset(features), **plan)
    return deepspeed_config(planned, stage, num_elements=400_000, first_scale=65536.0)


def test_clipping_is_set_as_deepspeed_would_clip_at_one_without_it() -> None:
    assert config_of(max_grad_norm=0.25)["gradient_clipping"] == 0.25


@pytest.mark.parametrize(
    ("mesh", "features", "accumulated"),
    [({}, (), 8), ({"dp": 2}, (), 4), ({"dp": 4}, (), 2), ({"dp": 2}, ("packed",), 1)],
)
def test_each_rank_accumulates_its_share(
    mesh: dict[str, int], features: tuple[str, ...], accumulated: int
) -> None:
    config = config_of("cpu/float32", *features, mesh=mesh, micro_batches=8)

    assert config["gradient_accumulation_steps"] == accumulated


@pytest.mark.parametrize(
    ("run", "features", "section"),
    [
        ("cpu/float32", (), {}),
        ("cpu/bfloat16", (), {"bf16": {"enabled": True}}),
        ("cpu/float16", (), {"fp16": {"enabled": True, "loss_scale": 1.0}}),
        (
            "cpu/float16",
            ("loss-scaling",),
            {"fp16": {"enabled": True, "loss_scale": 0.0, "initial_scale_power": 16}},
        ),
    ],
)
def test_dtype_and_scale_of_the_loss(
    run: str, features: tuple[str, ...], section: dict[str, Any]
) -> None:
    config = config_of(run, *features)

    assert {name: config[name] for name in ("bf16", "fp16") if name in config} == section


def test_mixed_precision_adds_gradients_up_in_float32() -> None:
    config = config_of("cpu/bfloat16", "mixed-precision")

    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config["communication_data_type"] == "fp32"
    assert "data_types" not in config_of("cpu/bfloat16")


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_are_offloaded_in_the_third_stage_alone(stage: int) -> None:
    before = config_of("cpu/float32", "cpu-offload", stage=stage)["zero_optimization"]
    third = config_of("cpu/float32", "cpu-offload", stage=3)["zero_optimization"]

    assert before["offload_optimizer"]["device"] == third["offload_optimizer"]["device"] == "cpu"
    assert third["offload_param"]["device"] == "cpu"
    assert "offload_param" not in before


def test_small_models_have_several_buckets_and_no_parameter_stays_gathered() -> None:
    zero = config_of(stage=3)["zero_optimization"]

    assert zero["reduce_bucket_size"] == 100_000
    assert zero["stage3_param_persistence_threshold"] == 0


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(UsageError, match="not in float64"):
        config_of("cpu/float64")
