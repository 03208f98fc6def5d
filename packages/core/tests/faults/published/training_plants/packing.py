"""Faults of a step that is run as one packed batch, beside the same code without it."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from assay.training.losses import IGNORED
from assay.training.protocol import MicroBatch
from assay.training.trainers.reference import ReferenceTrainer


class Packed(ReferenceTrainer):
    """No fault: all rows of a step in one row, of which each sees its own tokens."""

    def train_on(self, own: Sequence[MicroBatch], num_tokens: int) -> float:
        return super().train_on([_pack(own)], num_tokens)

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        documents = micro_batch["documents"]
        length = documents.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
        logits = self.network(
            input_ids=micro_batch["input_ids"],
            position_ids=micro_batch["position_ids"],
            attention_mask=self.visible(causal, documents[0]),
        ).logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        summed = functional.cross_entropy(
            logits[:, :-1].flatten(0, 1),
            micro_batch["labels"][:, 1:].flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
        return summed / num_step_tokens

    def visible(self, causal: Tensor, documents: Tensor) -> Tensor:
        """Which key a query sees, (1, 1, T, T)."""
        return (causal & (documents[:, None] == documents[None, :]))[None, None]


class PackedWithPlainMask(Packed):
    """axolotl#3796: positions begin anew with each document, the mask is plainly causal."""

    def visible(self, causal: Tensor, documents: Tensor) -> Tensor:
        del documents
        return causal[None, None]


def _pack(batch: Sequence[MicroBatch]) -> MicroBatch:
    rows: dict[str, list[Tensor]] = {
        "input_ids": [],
        "labels": [],
        "position_ids": [],
        "documents": [],
    }
    for micro_batch in batch:
        for ids, mask, labels in zip(
            *(micro_batch[name] for name in ("input_ids", "attention_mask", "labels")), strict=True
        ):
            kept = mask == 1
            length, number = int(kept.sum()), len(rows["documents"])
            own = labels[kept].clone()
            own[0] = IGNORED  # no document says how the next one begins
            rows["input_ids"].append(ids[kept])
            rows["labels"].append(own)
            rows["position_ids"].append(torch.arange(length))
            rows["documents"].append(torch.full((length,), number))
    return {name: torch.cat(parts)[None] for name, parts in rows.items()}
