"""Batches of token ids that run through the model together.

Shapes: B rows, T positions.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import xxhash
from pydantic import TypeAdapter

from assay.inputs.prompts import Prompt

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts that the model continues together, padded on the left."""

    number: int
    rows: tuple[tuple[int, ...], ...]
    """Token ids of each prompt, without padding."""
    prompts: tuple[int, ...]
    """The number of each row's prompt in the plan."""
    pad_token_id: int
    max_new_tokens: int
    """0 for a model that cannot generate."""
    prefill_chunk: int | None = None
    """`prefill_chunk_size` of the generation; None for a prefill in one call."""
    padded_to: int = 0
    """Least length of each row, to keep the padding of another batch."""

    @property
    def length(self) -> int:
        """Count the tokens of each row including padding, T."""
        return max(self.padded_to, *(len(row) for row in self.rows))

    @property
    def input_ids(self) -> "torch.Tensor":
        """Return token ids (B, T) in int64, padded on the left."""
        import torch

        length, pad = self.length, self.pad_token_id
        return torch.tensor([[pad] * (length - len(row)) + list(row) for row in self.rows])

    @property
    def attention_mask(self) -> "torch.Tensor":
        """Return 1 for a token and 0 for padding (B, T), int64."""
        import torch

        length = self.length
        return torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in self.rows])


@dataclass(frozen=True, slots=True)
class InputPlan:
    """All inputs of a check."""

    batches: tuple[Batch, ...]
    prompts: tuple[Prompt, ...]
    notes: tuple[str, ...] = ()
    """Sentences about options and usual inputs that the model does not allow."""

    @property
    def content_hash(self) -> str:
        """Hash all inputs of the model, but no texts and notes, with XXH3-128."""
        record = json.dumps([asdict(batch) for batch in self.batches], sort_keys=True)
        return xxhash.xxh3_128_hexdigest(record.encode())

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "InputPlan":
        """Make the plan from the result of `to_json`."""
        return TypeAdapter(cls).validate_python(record)
