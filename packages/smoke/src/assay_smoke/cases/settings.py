"""What a case means in the terms of core: options, mesh, trainer and features of a training run."""

from assay.devices.run_string import parse_run
from assay.training.check import options_for
from assay.training.processes.requests import TrainerRequest, TrainOptions
from assay.training.protocol import MIXED_PRECISION
from assay_smoke.matrix.cases import Case, Feature, Framework

# 00000.00000.00000: two steps, a checkpoint, two steps.
STEPS, RESUME_AT = 4, 2

# The trusted side: what every case is held to.
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

_FEATURES: dict[Feature, str] = {
    "offload": "cpu-offload",
    "recompute": "recompute",
    "compile": "compile",
}


def needs_deepspeed(case: Case) -> bool:
    """Whether the framework's own trainer is DeepSpeed."""
    return is_deepspeed(TRAINERS[case.framework])


def is_deepspeed(trainer: str) -> bool:
    """Whether a trainer, by its name, is one of DeepSpeed's."""
    return trainer.startswith("deepspeed")


def mesh_of(case: Case) -> dict[str, int]:
    """How many ranks each axis has: the one that the framework spreads training over."""
    axis = {"tensor-parallel": "tp", "pipeline": "pp"}.get(case.framework, "dp")
    return {axis: case.cards}


def options_of(case: Case) -> TrainOptions:
    """What is trained: every rank of dp, and every stage of a pipeline, has a micro-batch or two."""
    shares = 1 if case.framework == "tensor-parallel" else case.cards
    options = TrainOptions(
        model=f"micro:{case.family}",
        steps=STEPS,
        resume_at=RESUME_AT,
        micro_batches=shares * (2 if "accumulation" in case.features else 1),
        lora="lora" in case.features,
        # Every shape is compiled anew: here one is enough.
        shapes="equal-in-all-steps" if "compile" in case.features else "unequal",
    )
    return options_for(options, mesh_of(case), features_of(case))


def features_of(case: Case) -> list[str]:
    """The features of the trainer's plan, beyond LoRA."""
    features = [name for feature, name in _FEATURES.items() if feature in case.features]
    if case.precision == "float16":
        features += [MIXED_PRECISION, "loss-scaling"]
    if case.batches == "packed":
        features.append("packed")
    return sorted(features)


def request_of(
    case: Case, device: str, golden: str, folder: str, trainer: str | None
) -> TrainerRequest:
    """The request to the ranks of a case.

    device: as in a RUN; golden: what the reference left; trainer: in place of the framework's own.
    """
    run = f"{device}/{case.precision}"
    parse_run(run)
    return TrainerRequest(
        options=options_of(case),
        candidate=run,
        golden=golden,
        folder=folder,
        trainer=trainer or TRAINERS[case.framework],
        mesh=mesh_of(case),
        features=features_of(case),
    )
