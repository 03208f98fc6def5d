"""Prompts and batches that cover cases in which generation often fails.

Importing this package does not import torch: a batch makes its tensors on access.
"""

from assay.inputs.batches import (
    Batch,
    InputPlan,
    InsertedMedia,
    Media,
    ModelLimits,
    Prompt,
    PromptLine,
    built_in_texts,
    is_expectation,
    join_media,
    limits_of,
    load_prompts,
    read_prompts,
)
from assay.inputs.planning import (
    LONG_LENGTH,
    BatchOptions,
    LengthRange,
    describe_hard_cases,
    draw_media,
    insert_media,
    parse_lengths,
    plan_batches,
)

__all__ = [
    "LONG_LENGTH", "Batch", "BatchOptions", "InputPlan", "InsertedMedia", "LengthRange", "Media", "ModelLimits", "Prompt", "PromptLine", "built_in_texts",
    "describe_hard_cases", "draw_media", "insert_media", "is_expectation", "join_media", "limits_of", "load_prompts", "parse_lengths", "plan_batches",
    "read_prompts",
]  # fmt: skip
