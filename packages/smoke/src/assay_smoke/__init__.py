"""Abbreviated training runs: set-up, a few steps, checkpoint, tear-down, resume."""
