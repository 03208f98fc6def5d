"""Verdicts in words."""
