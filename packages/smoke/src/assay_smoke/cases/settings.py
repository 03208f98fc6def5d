"""Translates a case to core's terms: options, mesh, trainer and features of a training run."""

import math

from assay.training.check import options_for
from assay.training.processes.requests import TrainOptions
from assay.training.protocol import MIXED_PRECISION
from assay_smoke.matrix.cases import FEATURES, Case, FeatureEntry, Framework

# Two steps, a checkpoint, two steps.
STEPS, RESUME_AT = 4, 2

REFERENCE = "cpu/float32"

TRAINERS: dict[Framework, str] = {
    "one-process": "reference",
    "ddp": "ddp",
    "fsdp": "fsdp",
    "tensor-parallel": "tensor-parallel",
    "pipeline": "pipeline",
    "zero1": "deepspeed-zero1",
    "zero2": "deepspeed-zero2",
    "zero3": "deepspeed-zero3",
}


def is_deepspeed(trainer: str) -> bool:
    """Return whether the named trainer is one of DeepSpeed's."""
    return trainer.startswith("deepspeed")


def mesh_of(case: Case) -> dict[str, int]:
    """Return the mesh: all cards on the axis over which the framework spreads training."""
    axis = {"tensor-parallel": "tp", "pipeline": "pp"}.get(case.framework, "dp")
    return {axis: case.cards}


def options_of(case: Case) -> TrainOptions:
    """Return the training options. Every dp rank and every pipeline stage has at least one micro-batch."""
    shares = 1 if case.framework == "tensor-parallel" else case.cards
    changed = {key: value for entry in _entries(case) for key, value in entry.options.items()}
    options = TrainOptions(
        model=f"micro:{case.family}",
        steps=STEPS,
        resume_at=RESUME_AT,
        micro_batches=shares * math.prod(entry.micro_batches for entry in _entries(case)),
        **changed,
    )
    return options_for(options, mesh_of(case), features_of(case))


def _entries(case: Case) -> list[FeatureEntry]:
    return [entry for name, entry in FEATURES.items() if name in case.features]


def features_of(case: Case) -> list[str]:
    """Return the features of the training plan, without LoRA."""
    features = [one.trainer_feature for one in _entries(case) if one.trainer_feature is not None]
    if case.precision == "float16":
        features += [MIXED_PRECISION, "loss-scaling"]
    if case.batches == "packed":
        features.append("packed")
    return sorted(features)
