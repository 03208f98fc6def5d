"""The memory and disk that a golden needs, estimated before any weight is loaded."""

from dataclasses import dataclass
from typing import Literal

import torch

from assay.errors import MachineError
from assay.generate.passes.generation_loop import count_tokens
from assay.generate.processes.requests import GoldenRequest
from assay.hooks.values.boundary import Boundary
from assay.hooks.widening import is_widened_on_use
from assay.inputs import InputPlan
from assay.models import LoadedModel
from assay.progress import format_size

# How the yardstick's weights are widened: all before it runs, or those of each module while it runs.
Widening = Literal["at once", "on use"]

# Imports, and tensors of one call.
BASE_BYTES = 700 << 20

# Copies of the logits in memory while they are written.
_LOGIT_COPIES = 3

# Stored with each logit of the yardstick: the noise run's logit and the sampler's score, both in float32.
_BYTES_PER_LOGIT = 8


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory and disk that a golden needs, in bytes."""

    memory: int
    memory_on_use: int
    """Memory if the weights of one module at a time are widened for the yardstick."""
    disk: int

    def describe(self, widening: Widening) -> str:
        """Describe the needs for a message."""
        memory = self.memory if widening == "at once" else self.memory_on_use
        return f"about {format_size(memory)} of memory and {format_size(self.disk)} of disk"


def estimate_needs(
    request: GoldenRequest,
    outline: LoadedModel,
    plan: InputPlan,
    yardstick_dtype: str,
    num_values: float,
) -> Needs:
    """Estimate what the golden of `request` needs.

    outline: the model without weights. num_values: numbers at all module boundaries for each token.
    """
    itemsize = getattr(torch, yardstick_dtype).itemsize
    weights = list(outline.model.parameters())
    num_weights = sum(one.numel() for one in weights)
    num_narrow = sum(one.numel() for one in weights if is_widened_on_use(one))
    widest = max(
        sum(one.numel() for one in module.parameters(recurse=False) if is_widened_on_use(one))
        for module in outline.model.modules()
    )
    narrow = max(getattr(torch, dtype).itemsize for dtype in request.noise_for)
    # A model that does not generate has logits for all tokens.
    num_logits = [
        len(batch.rows) * (batch.max_new_tokens or batch.length) * outline.vocab_size
        for batch in plan.batches
    ]
    disk = 0
    for dtype in request.noise_for:
        stored = Boundary.exact_inputs_for(getattr(torch, dtype)).stored or torch.float64
        disk += sum(num_logits) * (itemsize + _BYTES_PER_LOGIT)
        if request.level == "module":  # logits are results of modules, too
            of_modules = count_tokens(plan.batches) * num_values + sum(num_logits)
            disk += int(of_modules * stored.itemsize)
    of_calls = _LOGIT_COPIES * max(num_logits) * itemsize + BASE_BYTES
    return Needs(
        memory=num_weights * itemsize + of_calls,
        memory_on_use=num_narrow * narrow
        + (num_weights - num_narrow + widest) * itemsize
        + of_calls,
        disk=disk,
    )


def widening_within(num_weights: int, dtype: str, allowed: int) -> Widening:
    """Return how to widen a yardstick to `dtype`, so that one call fits into `allowed` bytes."""
    num_bytes = num_weights * getattr(torch, dtype).itemsize
    return "on use" if num_bytes + BASE_BYTES > allowed else "at once"


def choose_widening(needs: Needs, allowed: int) -> Widening:
    """Return the widening with which the reference fits into `allowed` bytes.

    Raises: MachineError, with the numbers, if it fits with neither.
    """
    if needs.memory <= allowed:
        return "at once"
    if needs.memory_on_use > allowed:
        raise MachineError(
            f"the reference needs about {format_size(needs.memory_on_use)} of memory, even if it"
            f" widens one module at a time. Only {format_size(allowed)} is free or allowed by --memory."
            " Use shorter --prompts, or fewer --max-new-tokens"
        )
    return "on use"
