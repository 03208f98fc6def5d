"""The memory and disk that a golden needs, estimated before any weight is loaded.

The model runs once without values, on torch's meta device, which gives the shape of every tensor at its
module boundaries.
"""

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from assay.devices.base import Device
from assay.errors import MachineError
from assay.generate.passes.generation_loop import count_tokens
from assay.generate.processes.requests import GoldenRequest
from assay.hooks.values.boundary import Boundary
from assay.hooks.values.nested import iterate_tensors
from assay.inputs import InputPlan
from assay.models import LoadedModel

# Tokens of the run without values.
_TRIAL_TOKENS = 64

# How the yardstick's weights are widened: all before it runs, or those of each module while it runs.
Widening = Literal["at once", "on use"]

# Imports, and tensors of one call.
_BASE_BYTES = 700 << 20

# Copies of the logits in memory while they are written.
_LOGIT_COPIES = 3

# Stored logits of each token: in float64 of the yardstick, in float32 of the noise run, the sampler's scores.
_BYTES_PER_LOGIT = 16


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
        return f"about {memory / 1e9:.1f} GB of memory and {self.disk / 1e9:.1f} GB of disk"


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
    num_weights = sum(one.numel() for one in outline.model.parameters())
    widest = max(
        sum(one.numel() for one in module.parameters(recurse=False))
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
        if request.level == "module":
            disk += int(count_tokens(plan.batches) * num_values * stored.itemsize)
        disk += sum(num_logits) * (_BYTES_PER_LOGIT + stored.itemsize)
    of_calls = _LOGIT_COPIES * max(num_logits) * itemsize + _BASE_BYTES
    return Needs(
        memory=num_weights * itemsize + of_calls,
        memory_on_use=num_weights * narrow + widest * itemsize + of_calls,
        disk=disk,
    )


def allowed_memory(device: Device, max_memory: int | None) -> int:
    """Return the bytes that a model on `device` may take; max_memory: what the user allows."""
    free = device.free_memory_bytes() or sys.maxsize  # 0 if unknown
    return free if max_memory is None else min(free, max_memory)


def widening_within(num_weights: int, dtype: str, allowed: int) -> Widening:
    """Return the widening to `dtype` for one call of a yardstick, in at most `allowed` bytes."""
    num_bytes = num_weights * getattr(torch, dtype).itemsize
    return "on use" if num_bytes + _BASE_BYTES > allowed else "at once"


def choose_widening(needs: Needs, allowed: int) -> Widening:
    """Return the widening with which the reference fits into `allowed` bytes.

    Raises: MachineError, with the numbers, if it fits with neither.
    """
    if needs.memory <= allowed:
        return "at once"
    if needs.memory_on_use > allowed:
        raise MachineError(
            f"the reference needs about {needs.memory_on_use / 1e9:.1f} GB of memory, of which it"
            f" may take {allowed / 1e9:.1f} GB (what is free, and --memory allows)"
        )
    return "on use"


def require_disk(needs: Needs, folder: Path, max_disk: int | None) -> None:
    """Raise MachineError, with the numbers, if the golden does not fit on the disk of `folder`.

    max_disk: the bytes that the user allows; None for the free space.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    allowed, where = (free, f"{folder} has {free / 1e9:.1f} GB free")
    if max_disk is not None and max_disk < free:
        allowed, where = max_disk, f"--disk allows {max_disk / 1e9:.1f} GB"
    if needs.disk > allowed:
        raise MachineError(
            f"the golden needs about {needs.disk / 1e9:.1f} GB of disk, and {where}: take shorter"
            " --prompts, fewer --max-new-tokens, or --level logits"
        )


@dataclass(frozen=True, slots=True)
class TrialCall:
    """A call of a model without values."""

    num_values: float
    """Numbers at all module boundaries for each token, each tensor once, and cache entries; no logits."""
    seconds: float

    @classmethod
    def of(cls, model: nn.Module) -> "TrialCall":
        """Call `model`, with parameters on the meta device."""
        seen: dict[int, Tensor] = {}
        config: Any = model.config
        # Without a padding token, transformers does not search the token ids, which have no values, for it.
        padding, config.pad_token_id = config.pad_token_id, None
        try:
            with torch.no_grad(), torch.device("meta"):
                token_ids = torch.zeros(1, _TRIAL_TOKENS, dtype=torch.long)
                with _noting_tensors(model, seen):
                    output: Any = model(input_ids=token_ids, return_dict=True)
                begin = time.perf_counter()
                model(input_ids=token_ids, return_dict=True)
                seconds = time.perf_counter() - begin
        finally:
            config.pad_token_id = padding
        layers = getattr(output.get("past_key_values"), "layers", None) or []
        cached = [getattr(layer, part, None) for layer in layers for part in ("keys", "values")]
        values = [*seen.values(), *(one for one in cached if isinstance(one, Tensor))]
        num_values: int = sum(one.numel() for one in values) - output["logits"].numel()
        return cls(num_values / _TRIAL_TOKENS, seconds)


@contextmanager
def _noting_tensors(model: nn.Module, seen: dict[int, Tensor]) -> Iterator[None]:
    """Collect the floating-point tensors that modules get and return, by identity."""

    def note(*values: object) -> None:
        for value in values:
            for _, tensor in iterate_tensors(value, ""):
                # Tables of attention are masks and probabilities, which are not stored as values.
                is_table = tensor.shape[-2:] == (_TRIAL_TOKENS, _TRIAL_TOKENS)
                if tensor.is_floating_point() and not is_table:
                    seen[id(tensor)] = tensor

    handles = [
        module.register_forward_hook(
            lambda _module, args, kwargs, output: note(args, kwargs, output), with_kwargs=True
        )
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
