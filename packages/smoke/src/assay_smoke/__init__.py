"""Short training runs: setup, a few steps, checkpoint, teardown, resume."""
