"""Matching of recorded calls, tensors, rows and choices with those of a running model."""
