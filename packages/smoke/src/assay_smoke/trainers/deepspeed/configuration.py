"""Translates a training plan to DeepSpeed's configuration."""

import math
from typing import Any

from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.training.protocol import LOSS_SCALING, MIXED_PRECISION, PACKED, TrainingPlan

# DeepSpeed's defaults are for large models. They would put all gradients of a small model into one
# bucket and keep all its parameters gathered under ZeRO-3.
_NUM_BUCKETS = 4
_SMALLEST_BUCKET = 2**16
_LARGEST_BUCKET = 500_000_000  # DeepSpeed's default

_FIRST_PARTITIONED_STAGE = 3

# Larger than any model, so that one sub-group of ZeRO-3 holds all parameters. All gradients are then
# clipped before the optimizer uses the first of them.
_ALL_ELEMENTS = 10**15

_DTYPES = ("float32", "bfloat16", "float16")


def deepspeed_config(
    plan: TrainingPlan, stage: int, num_elements: int, first_scale: float
) -> dict[str, Any]:
    """Return the configuration of an engine that trains `plan`.

    stage: of ZeRO, 1 to 3. num_elements: of all trained parameters. first_scale: initial loss scale in
        float16 under loss scaling.
    Raises: UsageError for plans that DeepSpeed cannot be configured for.
    """
    dtype = parse_run(plan.run).dtype
    if dtype not in _DTYPES:
        raise UsageError(f"DeepSpeed trains in {', '.join(_DTYPES)}, not in {dtype}")
    config: dict[str, Any] = {
        # DeepSpeed only counts samples by it. Micro-batches may have other numbers of rows.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": num_accumulated(plan),
        # Without it DeepSpeed clips at 1.0.
        "gradient_clipping": plan.max_grad_norm,
        "zero_optimization": _zero(stage, num_elements, "cpu-offload" in plan.features),
    }
    if dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
    elif dtype == "float16":
        config["fp16"] = {"enabled": True, "loss_scale": 1.0}  # a fixed scale without effect
        if LOSS_SCALING in plan.features:
            power = round(math.log2(first_scale))
            # A scale of 0 makes it dynamic.
            config["fp16"] |= {"loss_scale": 0.0, "initial_scale_power": power}
    if MIXED_PRECISION in plan.features:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        config["communication_data_type"] = "fp32"
    return config


def num_accumulated(plan: TrainingPlan) -> int:
    """Return the micro-batches of each rank in a step: its share, or one if they are packed."""
    return 1 if PACKED in plan.features else plan.micro_batches // plan.mesh.get("dp", 1)


def _zero(stage: int, num_elements: int, offload: bool) -> dict[str, Any]:  # noqa: FBT001
    bucket = min(max(num_elements // _NUM_BUCKETS, _SMALLEST_BUCKET), _LARGEST_BUCKET)
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": bucket}
    if stage == _FIRST_PARTITIONED_STAGE:
        zero |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
            "sub_group_size": _ALL_ELEMENTS,
        }
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
        if stage == _FIRST_PARTITIONED_STAGE:
            zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    return zero
