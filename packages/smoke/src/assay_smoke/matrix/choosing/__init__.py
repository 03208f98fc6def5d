"""Selects and orders the cases of a plan."""
