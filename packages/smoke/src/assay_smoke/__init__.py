"""Short training runs: setup, a few steps, checkpoint, teardown, resume."""

COMPARED_UNIT = "losses, tensors and runs"  # counted by the verdicts of this package
