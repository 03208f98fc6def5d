"""A case: one combination of what a training run can be asked for."""

from typing import Literal, get_args

from pydantic import Field

from assay.verdicts import Record

# How training is spread over cards: zero1 to zero3 are the stages of DeepSpeed's ZeRO.
Framework = Literal[
    "one-process", "ddp", "fsdp", "tensor-parallel", "pipeline", "zero1", "zero2", "zero3"
]

# Of the micro models, one for each kind of attention and of feed-forward layer.
Family = Literal["llama", "mistral", "gemma2", "mixtral"]

# float16 is with float32 weights beside, and a loss scale.
Precision = Literal["float32", "bfloat16", "float16"]

# `offload` keeps weights, gradients and moments on the host; `accumulation` makes a step of more
# micro-batches than there are ranks; `compile` is torch.compile of every decoder layer.
Feature = Literal["lora", "offload", "recompute", "accumulation", "compile"]

# Micro-batches padded to one length, or their rows laid end to end with positions that begin anew.
Batches = Literal["padded", "packed"]

# What is saved, read back and compared: the state in one file or in one of each rank; the model as
# users load it; the adapter by itself, or merged into the model's weights.
Checkpoint = Literal["full", "sharded", "hugging-face", "adapter", "merged"]

# Whether the run is interrupted where it is planned, or by SIGTERM in the middle of a step.
Interruption = Literal["planned", "sigterm"]


class Case(Record):
    """One combination; a default is what `id` does not name.

    cards: how many ranks train, each on a card of its own where there are cards.
    """

    framework: Framework
    cards: int = Field(ge=1)
    family: Family = "llama"
    precision: Precision = "float32"
    features: frozenset[Feature] = frozenset()
    batches: Batches = "padded"
    checkpoint: Checkpoint = "full"
    interruption: Interruption = "planned"

    @property
    def id(self) -> str:
        """As in `fsdp-2-lora-offload`: what is not by default, in the order of the fields."""
        parts = [self.framework, str(self.cards)]
        parts += [name for name in (self.family,) if name != "llama"]
        parts += [name for name in (self.precision,) if name != "float32"]
        parts += [feature for feature in get_args(Feature) if feature in self.features]
        parts += [name for name in (self.batches,) if name != "padded"]
        parts += [name for name in (self.checkpoint,) if name != "full"]
        parts += [name for name in (self.interruption,) if name != "planned"]
        return "-".join(parts)
