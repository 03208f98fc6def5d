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
from assay.inputs.documented import document_arguments, likely_tensors
from assay.inputs.planning import (
    LONG_LENGTH,
    BatchOptions,
    LengthRange,
    describe_hard_cases,
    insert_media,
    parse_lengths,
    plan_batches,
)

__all__ = [
    "LONG_LENGTH", "Batch", "BatchOptions", "InputPlan", "InsertedMedia", "LengthRange", "Media", "ModelLimits", "Prompt", "PromptLine", "built_in_texts",
    "describe_hard_cases", "document_arguments", "insert_media", "is_expectation", "join_media", "likely_tensors", "limits_of", "load_prompts", "parse_lengths", "plan_batches",
    "read_prompts",
]  # fmt: skip
