"""Runs packed samples through a micro model and measures whether they see each other.

Shapes: B rows, T positions, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from assay.models import load_model

# Both run everywhere. Flash attention does not, and takes the same batch.
ATTENTIONS = ("eager", "sdpa")

# Keys of a batch that the model's forward takes.
_INPUTS = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
)

# Limit of a packed sample's error over the noise. Error: packed in float32 against alone in float64.
# Noise: the largest such error of the pack's samples alone in float32. 400 clean packs of up to 8
# samples of up to 20 tokens reach 4.6. In 343 packs whose last token sees one token of another sample,
# the ratio is at least 329. The limit is near the geometric mean of both.
LIMIT = 40.0

MICRO_MODEL = "micro:llama"


class MicroModel:
    """A micro model in float64 and float32."""

    @cached_property
    def _exact(self) -> Any:  # noqa: ANN401 - transformers
        return load_model(MICRO_MODEL, dtype="float64").model

    @cached_property
    def _by_attention(self) -> dict[str, Any]:
        return {
            attention: load_model(MICRO_MODEL, dtype="float32", attention=attention).model
            for attention in ATTENTIONS
        }

    def packed_logits(self, batch: Mapping[str, Tensor], attention: str) -> Tensor:
        """Compute logits (B, T, V) of a whole batch in float32. Ids beyond the vocabulary are padding."""
        inputs: dict[str, Any] = {key: batch[key] for key in _INPUTS if key in batch}
        inputs = {
            key: int(value) if key.startswith("max_") else value for key, value in inputs.items()
        }
        known = batch["input_ids"] < self._exact.config.vocab_size
        inputs["input_ids"] = torch.where(known, batch["input_ids"], 0)
        with torch.no_grad():
            logits_BTV: Tensor = self._by_attention[attention](**inputs, use_cache=False).logits
        return logits_BTV

    def noise_ratios(
        self, packed: Sequence[tuple[Tensor, Sequence[int]]], attention: str
    ) -> list[float]:
        """Return each sample's error over the noise.

        packed: the logits (T, V) in the pack and the ids of each sample.
        """
        errors, noise = [], torch.finfo(torch.float32).eps / 2
        for logits_TV, ids in packed:
            ids_BT = torch.tensor([list(ids)])
            with torch.no_grad():
                exact_TV = self._exact(input_ids=ids_BT, use_cache=False).logits[0].double()
                alone = self._by_attention[attention](input_ids=ids_BT, use_cache=False)
            errors.append(_error(logits_TV, exact_TV))
            noise = max(noise, _error(alone.logits[0], exact_TV))
        return [error / noise for error in errors]


def _error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative error in the Frobenius norm, in float64."""
    return float((actual.double() - expected).norm() / expected.norm())
