"""Abbreviated setup, step and checkpoint cycles of a training run."""
