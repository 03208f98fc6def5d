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
    """Prompts that the model continues together, padded on the left.

    rows: token ids of each prompt, without padding.
    prompts: for each row the number of its prompt in the whole plan.
    max_new_tokens: 0 for a model that cannot generate.
    prefill_chunk: `prefill_chunk_size` of the generation; None for a prefill in one call.
    padded_to: minimal length of each row, for a row that keeps the padding of another batch.
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
        """Tokens of each row including padding, T."""
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
    """All inputs of a check, from `plan_batches`.

    notes: for the user, about options or usual inputs that this model does not allow.
    """

    batches: tuple[Batch, ...]
    prompts: tuple[Prompt, ...]
    notes: tuple[str, ...] = ()

    @property
    def content_hash(self) -> str:
        """XXH3-128 over all inputs of the model; texts and notes are left out."""
        record = json.dumps([asdict(batch) for batch in self.batches], sort_keys=True)
        return xxhash.xxh3_128_hexdigest(record.encode())

    def to_json(self) -> dict[str, Any]:
        """JSON values from which `from_json` makes an equal plan."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "InputPlan":
        """The plan from the result of `to_json`."""
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
