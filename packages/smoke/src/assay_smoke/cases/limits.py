"""Limits of the noise ratios of cases: those of training, and what clean cases need beyond them."""

from dataclasses import replace

from assay.comparing.limits import Limits
from assay.training.check import load_training_limits

# As for the limits of training.
MARGIN = 1.25

# The largest ratio of a clean case above a limit of training. A trajectory is all that is left of steps
# that nobody looked into: here libraries round otherwise (DeepSpeed's CPU Adam under LoRA, whose B begins
# at zero: zero3-4-mistral-lora-offload-accumulation-packed-merged-sigterm), and routers of bfloat16 choose
# otherwise (one-process-1-mixtral-bfloat16-lora-recompute-accumulation-packed-sigterm: 22.2).
LARGEST = {"trajectory-error": 27.5}


def limits_of_cases() -> Limits:
    """The limits that a case is judged by."""
    limits = load_training_limits("training")
    wider = {name: MARGIN * ratio for name, ratio in LARGEST.items()}
    return replace(limits, by_statistic=limits.by_statistic | wider)
