"""A check of DeepSpeed with settings that make clipping and gradient sums hard to get right."""

from pathlib import Path

import assay
from assay.verdicts import Verdict


def check_zero2(trainer: str, folder: Path) -> Verdict:
    """Check ZeRO-2 on two ranks in float16 with loss scaling, float32 copies and accumulation."""
    return assay.check_train(
        "micro:llama",
        reference="cpu/float32",
        candidate="cpu/float16",
        candidate_trainer=trainer,
        mesh="dp=2",
        steps=2,
        resume_at=1,
        micro_batches=4,
        loss_scaling=True,
        mixed_precision=True,
        output=folder,
    )
