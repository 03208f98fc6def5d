"""Which recorded call, tensor, row or choice belongs to the one that runs."""
