"""The sampler level: from the reference's logits to scores.

`generate` prepares the processors (temperature, top-k, top-p, penalties, minimum length). They get
the reference's logits and tokens at every step.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from assay.generate.passes.generation_loop import OutputError, generation_options, model_code
from assay.generate.passes.passes import Side, Work

# Scores are float32 in the generation loop, with a few rounded operations on each.
# Source: Higham, Accuracy and Stability, 3.1: n operations give at most n u / (1 - n u).
SCORE_TOLERANCE = 16 * 2.0**-24


@torch.no_grad()
def processed_scores(
    side: Side, work: Work, tokens_BN: Tensor, logits_BNV: Tensor, sampling: dict[str, Any]
) -> Tensor:
    """Compute the scores after all processors, (B, N, V) float32, for given tokens and logits.

    Raises: OutputError if the model's generate raises, or does not call `custom_generate`.
    """
    model: Any = side.loaded.model
    scores_BNV = torch.empty(logits_BNV.shape, dtype=torch.float32)
    device = next(model.parameters()).device
    is_called = False

    def instead_of_sampling(
        model: Any,  # noqa: ANN401 - as transformers calls it
        input_ids: Tensor,
        logits_processor: Any,  # noqa: ANN401
        **rest: Any,  # noqa: ANN401
    ) -> Tensor:
        nonlocal is_called
        del model, rest
        is_called = True
        sequence = torch.cat([input_ids, tokens_BN.to(input_ids.device)], dim=1)
        start = input_ids.shape[1]
        for step in range(tokens_BN.shape[1]):
            logits = logits_BNV[:, step].to(device, torch.float32)
            scores_BNV[:, step] = logits_processor(sequence[:, : start + step], logits).cpu()
        return sequence

    batch = work.batch
    with side.device.execution(), model_code():
        model.generate(
            batch.input_ids.to(device),
            attention_mask=batch.attention_mask.to(device),
            generation_config=generation_options(side.loaded, batch, sampling),
            custom_generate=instead_of_sampling,
        )
    if not is_called:
        raise OutputError("generate does not call its argument custom_generate", raised=True)
    return scores_BNV


@dataclass(frozen=True, slots=True)
class ScoreDifference:
    """The difference of two sets of scores."""

    num_tokens: int
    num_masked_differently: int
    """Pairs (token, id) that only one side excludes."""
    largest: float
    """Largest relative difference among scores that both keep; nan if a score is NaN."""

    @property
    def agrees(self) -> bool:
        """Return True if both sides draw the same ids with the same probabilities."""
        return self.num_masked_differently == 0 and self.largest <= SCORE_TOLERANCE


def compare_scores(actual_BNV: Tensor, expected_BNV: Tensor) -> ScoreDifference:
    """Compare processed scores, (B, N, V) each; ids that both exclude (-inf) agree."""
    excluded, actual_excluded = expected_BNV.isneginf(), actual_BNV.isneginf()
    kept = ~excluded & ~actual_excluded
    scale = expected_BNV.masked_fill(excluded, 0.0).abs().amax(-1, keepdim=True).clamp(min=1e-30)
    relative = ((actual_BNV - expected_BNV).abs() / scale)[kept]
    return ScoreDifference(
        actual_BNV.shape[0] * actual_BNV.shape[1],
        int((excluded != actual_excluded).sum()),
        float(relative.max()) if relative.numel() else 0.0,
    )
