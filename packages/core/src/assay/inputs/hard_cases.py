"""Find which hard cases a plan covers."""

from collections.abc import Sequence

from assay.inputs.batches import Batch
from assay.inputs.model_limits import ModelLimits

_FAR = 1000


def describe_hard_cases(batches: Sequence[Batch], limits: ModelLimits) -> dict[str, bool | None]:
    """Map each hard case to True if `batches` cover it, or None if the model cannot have it."""
    generates = limits.can_generate
    # The last new token is never an input.
    num_processed = [
        len(row) + max(0, batch.max_new_tokens - 1) for batch in batches for row in batch.rows
    ]
    window = limits.sliding_window
    far_possible = limits.max_positions is None or limits.max_positions > _FAR + 1
    return {
        "left padding": any(len({len(row) for row in batch.rows}) > 1 for batch in batches),
        "sequence longer than the sliding window": (
            None if window is None else any(length > window for length in num_processed)
        ),
        # The last of n tokens has position n - 1.
        "positions over 1,000": any(length - 1 > _FAR for length in num_processed)
        if far_possible
        else None,
        "chunked prefill": (
            any(
                batch.prefill_chunk is not None and batch.length > batch.prefill_chunk
                for batch in batches
            )
            if generates and not limits.whole_prefill
            else None
        ),
        # The first new token comes from the prefill.
        "decode with a cache": (
            any(batch.max_new_tokens > 1 for batch in batches) if generates else None
        ),
    }
