"""One check of DeepSpeed: with what makes its clipping and its sums of gradients hard to get right."""

from pathlib import Path

import assay
from assay.verdicts import Verdict


def check_zero2(trainer: str, folder: Path) -> Verdict:
    """ZeRO-2 on two ranks in float16: loss scaling, float32 copies, two micro-batches a rank."""
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
