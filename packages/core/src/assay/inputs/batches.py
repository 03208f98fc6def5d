"""Batches as data: which token ids go together through the model, and how.

Shapes: B rows, T positions.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from assay.inputs.prompts import Prompt

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Batch:
    """Some prompts that are generated from together, padded on the left.

    rows: token ids of each prompt, without padding.
    prompts: for each row its prompt's number in the whole plan.
    max_new_tokens: 0 for a model that generates nothing.
    prefill_chunk: `prefill_chunk_size` of the generation; None for a prefill in one call.
    padded_to: tokens of each row at least, for a row that keeps the padding of its batch.
    """

    number: int
    rows: tuple[tuple[int, ...], ...]
    prompts: tuple[int, ...]
    pad_token_id: int
    max_new_tokens: int
    prefill_chunk: int | None = None
    padded_to: int = 0

    @property
    def length(self) -> int:
        """Tokens of each row with its padding, T."""
        return max(self.padded_to, *(len(row) for row in self.rows))

    @property
    def input_ids(self) -> "torch.Tensor":
        """Token ids (B, T) in int64, padded on the left."""
        import torch

        length, pad = self.length, self.pad_token_id
        return torch.tensor([[pad] * (length - len(row)) + list(row) for row in self.rows])

    @property
    def attention_mask(self) -> "torch.Tensor":
        """1 for a token and 0 for padding (B, T), int64."""
        import torch

        length = self.length
        return torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in self.rows])


@dataclass(frozen=True, slots=True)
class InputPlan:
    """Everything a check feeds to the model.

    notes: what was asked for, or is usual, and could not be had from this model.
    """

    batches: tuple[Batch, ...]
    prompts: tuple[Prompt, ...]
    notes: tuple[str, ...] = ()

    @property
    def content_hash(self) -> str:
        """XXH3-128 over all that reaches the model; texts and notes do not count."""
        record = json.dumps([asdict(batch) for batch in self.batches], sort_keys=True)
        return xxhash.xxh3_128_hexdigest(record.encode())

    def to_json(self) -> dict[str, Any]:
        """JSON values from which `from_json` makes an equal plan."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "InputPlan":
        """The plan that `to_json` was called on."""
        batches = tuple(
            Batch(
                **batch
                | {
                    "rows": tuple(tuple(row) for row in batch["rows"]),
                    "prompts": tuple(batch["prompts"]),
                }
            )
            for batch in record["batches"]
        )
        prompts = tuple(Prompt(item["text"], tuple(item["ids"])) for item in record["prompts"])
        return cls(batches, prompts, tuple(record["notes"]))
