"""Abbreviated training runs: set-up, a few steps, checkpoint, tear-down, resume."""

COMPARED_UNIT = "losses, tensors and runs"  # what the verdicts of this package count
