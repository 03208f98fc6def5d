"""Wording of verdicts."""
