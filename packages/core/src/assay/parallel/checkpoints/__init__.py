"""Weights and training states of divided models, in files."""
