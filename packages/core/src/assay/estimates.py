"""The time, memory and disk that a check takes, before any weight is loaded.

Time follows from a call of the model without values, on torch's meta device, and from the speed of one
product on the device.
"""

import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.devices.base import Device
from assay.errors import MachineError
from assay.models.config_files import first_line
from assay.progress import format_size
from assay.runs import Progress

if TYPE_CHECKING:
    from torch import Tensor, nn

# The probed matrix has more weights than caches hold.
_ROWS, _COLUMNS = 4096, 4096
_FEW_TOKENS, _MANY_TOKENS = 4, 64

# Approximate seconds of work outside of products, on x86-64 with two cores. A model is loaded and its
# weights are hashed; hooks of a module run Python; the errors of a value are summed.
SECONDS_PER_LOADED_WEIGHT = 1e-8
SECONDS_PER_MODULE_CALL = 3e-4
SECONDS_PER_STORED_BYTE = 2e-9
SECONDS_PER_COMPARED_VALUE = 1.3e-8


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds that a device takes for the weights of a model in one dtype."""

    weight: float
    """To read a weight in a call of a few tokens."""
    product: float
    """To multiply a weight by one of many tokens."""

    @classmethod
    def probe(cls, device: Device, dtype: str, stored: str | None = None) -> "Speed":
        """Measure products of tokens with one matrix.

        stored: the dtype from which weights are widened to `dtype` before each use; None for `dtype`.
        """
        import torch

        place, computed = device.torch_device, getattr(torch, dtype)
        narrow = torch.ones(_ROWS, _COLUMNS, dtype=getattr(torch, stored or dtype), device=place)
        weights = narrow if stored is None else torch.empty_like(narrow, dtype=computed)

        def measure(num_tokens: int) -> float:
            tokens = torch.ones(num_tokens, _COLUMNS, dtype=computed, device=place)
            times = []
            for _ in range(2):  # the first product prepares the device
                begin = time.perf_counter()
                if weights is not narrow:
                    weights.copy_(narrow)
                torch.mm(tokens, weights.t())
                device.synchronize()
                times.append(time.perf_counter() - begin)
            return min(times) / weights.numel()

        with device.execution():
            return cls(measure(_FEW_TOKENS), measure(_MANY_TOKENS) / _MANY_TOKENS)


# Few models have a dim of 61, so a (61, 61) tensor is a mask or probabilities of attention.
_TRIAL_TOKENS = 61


@dataclass(frozen=True, slots=True)
class TrialCall:
    """The sizes of a model's call."""

    num_values: float
    """Numbers at all module boundaries for each token, each tensor once, and cache entries; no logits."""
    num_multiplied: float
    """Weights by which each token is multiplied: of experts, those that it chooses."""
    num_modules: int
    num_state_values: int = 0
    """Numbers in the recurrent states of one row, which each call replaces."""

    @classmethod
    def of(cls, model: "nn.Module") -> "TrialCall":
        """Call `model`, with parameters on the meta device."""
        import torch
        from torch.utils.flop_counter import FlopCounterMode

        from assay.hooks.caches import find_caches, list_parts

        seen: dict[int, Tensor] = {}
        config: Any = model.config
        # Without a padding token, transformers does not search the token ids, which have no values, for it.
        padding, config.pad_token_id = config.pad_token_id, None
        try:
            with torch.no_grad(), torch.device("meta"):
                token_ids = torch.zeros(1, _TRIAL_TOKENS, dtype=torch.long)
                with _noting_tensors(model, seen), FlopCounterMode(display=False) as operations:
                    output: Any = model(input_ids=token_ids, return_dict=True)
        finally:
            config.pad_token_id = padding
        parts = [part for _, cache in find_caches(output) for part in list_parts(cache)]
        cached = sum(part.tensor.numel() for part in parts if part.length is not None)
        num_state_values = sum(part.tensor.numel() for part in parts if part.length is None)
        logits = output.get("logits")
        num_logits = 0 if logits is None else logits.numel()
        num_values = sum(one.numel() for one in seen.values()) + cached - num_logits
        num_multiplied = operations.get_total_flops() / 2 / _TRIAL_TOKENS
        num_modules = sum(1 for _ in model.modules())
        return cls(num_values / _TRIAL_TOKENS, num_multiplied, num_modules, num_state_values)

    def num_recorded(self, num_tokens: int, num_steps: int) -> float:
        """Return how many numbers a recording holds. num_steps: calls, each counted once for every row."""
        return num_tokens * self.num_values + num_steps * self.num_state_values

    def seconds(self, speed: Speed, num_calls: int, num_tokens: int) -> float:
        """Estimate calls that read the weights `num_calls` times, with many tokens `num_tokens` in all."""
        weights = num_calls * speed.weight + num_tokens * speed.product
        return (
            self.num_multiplied * weights + num_calls * self.num_modules * SECONDS_PER_MODULE_CALL
        )


@contextmanager
def _noting_tensors(model: "nn.Module", seen: "dict[int, Tensor]") -> Iterator[None]:
    """Collect the floating-point tensors that modules get and return, by identity."""
    from assay.hooks.tensors import iterate_tensors

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


def allowed_memory(device: Device, max_memory: int | None = None) -> int:
    """Return the bytes that a model may use on `device`: what is free, or `max_memory` if that is less."""
    free = device.free_memory_bytes() or sys.maxsize  # 0 if unknown
    return free if max_memory is None else min(free, max_memory)


def require_disk(what: str, needed: int, folder: Path, max_disk: int | None, advice: str) -> None:
    """Raise MachineError, with the numbers, if `needed` bytes do not fit on the disk of `folder`.

    what: needs them, for the message. max_disk: the bytes that the user allows; None for the free space.
    advice: options that need less.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    allowed, where = (free, f"{folder} has {format_size(free)} free")
    if max_disk is not None and max_disk < free:
        allowed, where = max_disk, f"--disk allows {format_size(max_disk)}"
    if needed > allowed:
        raise MachineError(
            f"{what} needs about {format_size(needed)} of disk, but {where}. Use {advice}"
        )


def report_unknown(error: Exception, limits: Mapping[str, object], progress: Progress) -> None:
    """Report that `error` prevents an estimate.

    limits: values of the user's limits by option; None if not given.
    Raises: MachineError if a limit was given, because it cannot be checked.
    """
    problem = f"time, memory and disk cannot be estimated for this model: {first_line(error)}"
    for name, limit in limits.items():
        if limit is not None:
            raise MachineError(f"{name}: {problem}") from error
    progress.note(problem)
