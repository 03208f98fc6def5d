"""Which micro-batches of a step have one shape, and what the pipelines of a trainer take of that."""

from typing import Literal

# Equally many rows and tokens, padding included.
# unequal: no two micro-batches of a step; equal: all of a step; equal-first-step: all of the first,
# no two of the others; equal-in-all-steps: all of a run.
Shapes = Literal["unequal", "equal-first-step", "equal", "equal-in-all-steps"]

EQUAL_IN_A_STEP: tuple[Shapes, ...] = ("equal", "equal-in-all-steps")

# Attribute of a trainer's class, a Shapes: what its pipelines take. "equal" where there is none.
PIPELINE_SHAPES = "pipeline_shapes"

# Of the trainer `pipeline`: one schedule over all micro-batches in the first step, then one for each.
OF_NAMED_PIPELINES: Shapes = "equal-first-step"
