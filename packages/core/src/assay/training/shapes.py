"""Shapes of the micro-batches of a run, and the shapes that pipelines accept."""

from typing import Literal

# Micro-batches of equal shape have equally many rows and tokens, padding included.
# unequal: none of a step; equal: all of a step; equal-first-step: all of the first step, and none of
# another step; equal-in-all-steps: all of a run.
Shapes = Literal["unequal", "equal-first-step", "equal", "equal-in-all-steps"]

EQUAL_IN_A_STEP: tuple[Shapes, ...] = ("equal", "equal-in-all-steps")

# Optional attribute of a trainer's class, by default "equal".
PIPELINE_SHAPES = "pipeline_shapes"

# The trainer `pipeline` has one schedule for all micro-batches of the first step, then one for each.
OF_NAMED_PIPELINES: Shapes = "equal-first-step"
