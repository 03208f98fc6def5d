"""Limits of the noise ratios of a case: those of training, and what an optimizer of a library needs."""

from dataclasses import replace

from assay.comparing.limits import Limits
from assay.training.check import load_training_limits
from assay_smoke.cases.settings import needs_deepspeed
from assay_smoke.matrix.cases import Case

# As for the limits of training.
_MARGIN = 1.25

# DeepSpeed's CPU Adam rounds powers of its betas otherwise than torch's. The largest ratio of a clean case
# (zero3-4-mistral-lora-offload-recompute-accumulation-adapter, in float32): LoRA's B begins at zero, and is
# nothing but updates.
_LARGEST_OF_CPU_ADAM = 28.0


def limits_of(case: Case) -> Limits:
    """The limits that `case` is judged by."""
    limits = load_training_limits("training")
    if not (needs_deepspeed(case) and "offload" in case.features):
        return limits
    wider = {"trajectory-error": _MARGIN * _LARGEST_OF_CPU_ADAM}
    return replace(limits, by_statistic=limits.by_statistic | wider)
