"""Prompts and batches that reach the cases where generation goes wrong.

Importing this package imports no torch: tensors are made when a batch is asked for them.
"""

from assay.inputs.batches import Batch, InputPlan
from assay.inputs.hard_cases import describe_hard_cases
from assay.inputs.model_limits import ModelLimits, limits_of
from assay.inputs.planning import LengthRange, PlanOptions, parse_lengths, plan_batches
from assay.inputs.prompts import Prompt, built_in_texts, load_prompts, read_prompts

__all__ = [
    "Batch",
    "InputPlan",
    "LengthRange",
    "ModelLimits",
    "PlanOptions",
    "Prompt",
    "built_in_texts",
    "describe_hard_cases",
    "limits_of",
    "load_prompts",
    "parse_lengths",
    "plan_batches",
    "read_prompts",
]
