"""Addresses of tensors: where in a run a value was computed."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Phase = Literal[
    "inputs", "forward", "backward", "reduce", "clip", "optimizer", "checkpoint", "sampler"
]

# Levels of depth, from the least to the most, where something is recorded and where it is judged.
# By default a check is `auto`: it goes as deep as it can.
RecordedLevel = Literal["logits", "module"]
CapturedLevel = Literal["logits", "module", "op"]
ComparedLevel = Literal["logits", "layer", "module", "op"]
JudgedLevel = Literal["tokens", "logits", "modules"]
CheckLevel = Literal["auto", JudgedLevel]

# What a check leaves in its folder besides verdict, measurements and report: all files, the golden, nothing.
KeptFiles = Literal["full", "replay", "verdict"]

# Path segments that wrappers add: torch.compile, DDP and DeepSpeed, FSDP1, activation
# checkpointing. peft puts the whole model under base_model.model.
_WRAPPER_SEGMENTS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?:\.|$)"
)
_WRAPPER_PREFIXES = ("module.", "base_model.model.")
# With or without a head, or with a vision part.
_MODEL_PREFIXES = ("model.", "language_model.", "transformer.")
_WRAPPERS = ("module", "base_model", "base_model.model")


def unwrapped_path(path: str) -> str:
    """Return the path in the unwrapped Hugging Face model for a module path in a wrapped one.

    >>> unwrapped_path("module._orig_mod.model.layers.0._checkpoint_wrapped_module.mlp")
    'model.layers.0.mlp'
    """
    path = _WRAPPER_SEGMENTS.sub("", path).rstrip(".")
    while path.startswith(_WRAPPER_PREFIXES):
        path = path.removeprefix("module.").removeprefix("base_model.model.")
    return "" if path in _WRAPPERS else path


def strip_model_prefixes(path: str) -> str:
    """Return a path without the prefixes by which implementations of one model differ.

    >>> strip_model_prefixes("model.language_model.layers.0.mlp")
    'layers.0.mlp'
    """
    while path.startswith(_MODEL_PREFIXES):
        path = path.partition(".")[2]
    return path


@dataclass(frozen=True, slots=True, order=True)
class CallSite:
    """The address of one call of a module, or of one training stage."""

    step: int
    """Generation: number of the model's forward call; 0 is the prefill or its first chunk.
    Training: number of the optimizer step."""
    module: str
    """Path in the unwrapped Hugging Face model; "" is the model itself."""
    call: int = 0
    """Number of earlier calls of this module in the same step and micro-batch."""
    phase: Phase = "forward"
    micro_batch: int = 0
    """Number of the micro-batch; in generation, of the batch of prompts."""
    rank: int = 0

    @property
    def backward(self) -> "CallSite":
        """Return the address of the gradients of this call."""
        return CallSite(self.step, self.module, self.call, "backward", self.micro_batch, self.rank)

    def at_step(self, step: int) -> "CallSite":
        """Return the address of the same call in another step."""
        return CallSite(step, self.module, self.call, self.phase, self.micro_batch, self.rank)


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """The address of one tensor: a call and one of its ports.

    Ports are `input.NAME` (a name of the forward signature), `output`, `changed.NAME` (an argument
    that the call changed, such as a cache) and, for an operation inside a module,
    `op.INDEX.NAME.output`. Keys of nested structures are appended: `output.0`,
    `input.position_embeddings.1`, `changed.past_key_values.3.keys`,
    `changed.cache_params.3.recurrent_states.0`.
    """

    at: CallSite
    port: str

    def __str__(self) -> str:
        at = self.at
        text = f"{at.module or '(model)'}:{self.port} {at.phase} step {at.step}"
        for name, value in (("call", at.call), ("micro-batch", at.micro_batch), ("rank", at.rank)):
            text += f" {name} {value}" if value else ""
        return text


def holds_heads(port: str) -> bool:
    """Return True for the port of keys or values of a cache, (B, heads, tokens, D)."""
    return port.startswith("changed.") and port.endswith((".keys", ".values"))


class LocalPart(NamedTuple):
    """A rank's part of the tensor of `shape` at a port of a module."""

    module: str
    port: str
    local: "Tensor"
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowMap:
    """The prompt and positions of the rows of a call's tensors."""

    prompts: tuple[int, ...]
    """The prompt number of each batch row, (B,)."""
    positions: tuple[tuple[int, ...], ...]
    """The position of each token in its prompt, (B, T); -1 for padding, which is not compared."""

    @property
    def num_rows(self) -> int:
        """Return the number of rows of the batch, B."""
        return len(self.prompts)

    @property
    def length(self) -> int:
        """Return the number of tokens of each row in this call, T."""
        return len(self.positions[0]) if self.positions else 0

    @property
    def has_padding(self) -> bool:
        """Return True if a row is padded."""
        return any(-1 in row for row in self.positions)

    @property
    def first_token(self) -> tuple[int, int]:
        """Return prompt and position of the first token of the first row; position -1 without one."""
        if not self.prompts:
            return -1, -1
        known = (position for position in self.positions[0] if position >= 0)
        return self.prompts[0], next(known, -1)


@dataclass(frozen=True, slots=True)
class Call:
    """One finished call of a module, with the ports of its tensors."""

    site: CallSite
    class_name: str
    caller: str | None
    """Path of the module whose code called this one and computed its inputs; None for the root call."""
    order: int
    """Number of the call, in the order of starts over the whole trace."""
    ports: tuple[str, ...] = ()
    rows: RowMap | None = None
    constants: Mapping[str, object] = field(default_factory=dict)
    """Arguments other than tensors, by port, as JSON values."""
    placements: Mapping[str, str] = field(default_factory=dict)
    """By port, the placement of a tensor over ranks; a tensor without one is whole."""

    @property
    def group_totals(self) -> set[int]:
        """Return the sums of the whole numbers in lists of arguments, such as the sizes of the groups of rows."""
        totals: Counter[str] = Counter()
        for port, value in self.constants.items():
            name, _, number = port.rpartition(".")
            if number.isdigit() and type(value) is int:
                totals[name] += value
        return {*totals.values()}
