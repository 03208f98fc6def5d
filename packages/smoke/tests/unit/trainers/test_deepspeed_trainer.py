"""The configuration of DeepSpeed, and its visible steps."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from assay.errors import UsageError
from assay.training.protocol import TrainingPlan
from assay_smoke.trainers.deepspeed.trainer import PausedCall, ShownGradients, deepspeed_config


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


def test_what_is_after_the_pause_runs_when_the_call_is_finished() -> None:
    done: list[str] = []
    paused: PausedCall

    def call() -> None:
        done.append("clip")
        paused.pause()
        done.append("step")

    paused = PausedCall(call)

    assert paused.start()
    assert done == ["clip"]
    paused.finish()
    assert done == ["clip", "step"]


def test_call_that_ends_before_its_pause_is_told_apart() -> None:
    done: list[str] = []
    paused = PausedCall(lambda: done.append("skipped"))

    assert not paused.start()
    assert done == ["skipped"]


def test_error_before_the_pause_is_raised_by_start() -> None:
    def call() -> None:
        raise ValueError("no gradients")

    with pytest.raises(ValueError, match="no gradients"):
        PausedCall(call).start()


def test_error_after_the_pause_is_raised_by_finish() -> None:
    paused: PausedCall

    def call() -> None:
        paused.pause()
        raise ValueError("no memory")

    paused = PausedCall(call)
    assert paused.start()

    with pytest.raises(ValueError, match="no memory"):
        paused.finish()


def test_call_that_is_never_finished_does_not_keep_the_process_alive() -> None:
    paused: PausedCall

    def call() -> None:
        paused.pause()

    paused = PausedCall(call)
    assert paused.start()

    waiting = [thread for thread in threading.enumerate() if thread.name.startswith("paused call")]
    assert waiting
    assert all(thread.daemon for thread in waiting)
    paused.finish()


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((2,), 3.0, dtype=torch.bfloat16)) for _ in range(2)]


def test_gradients_stand_in_float32_beside_narrower_parameters() -> None:
    held = parameters()
    ShownGradients(held).show(lambda parameter: torch.full(parameter.shape, 1 + 2.0**-20))

    for parameter in held:
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [1 + 2.0**-20] * 2


def test_unchanged_gradients_are_not_given_back() -> None:
    held, written = parameters(), list[Tensor]()
    shown = ShownGradients(held)
    shown.show(lambda parameter: torch.ones(parameter.shape))
    assert held[1].grad is not None
    held[1].grad.fill_(0.5)

    shown.hide(lambda parameter, value: written.append(value))

    assert [value.tolist() for value in written] == [[0.5, 0.5]]


def test_what_deepspeed_had_there_stands_there_again_as_it_is_written_to() -> None:
    held = parameters()
    own = torch.full((2,), 7.0, dtype=torch.bfloat16)
    held[0].grad = own
    shown = ShownGradients(held)
    shown.show(lambda parameter: torch.ones(parameter.shape))
    seen: list[Tensor | None] = []
    assert held[0].grad is not None
    held[0].grad.fill_(2.0)

    shown.hide(lambda parameter, value: seen.append(parameter.grad))

    assert seen == [own]
    assert held[1].grad is None


def test_next_backward_pass_gives_gradients_in_the_dtype_of_the_parameter() -> None:
    held = parameters()
    shown = ShownGradients(held)
    shown.show(lambda parameter: torch.ones(parameter.shape))
    shown.hide()

    (held[0] * 2).sum().backward()

    assert held[0].grad is not None
    assert held[0].grad.dtype == torch.bfloat16
