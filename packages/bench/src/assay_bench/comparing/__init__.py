"""Comparison of two evaluations. Imports neither torch nor lm-eval."""
