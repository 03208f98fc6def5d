"""Weights and training states of divided models, on their way from and to files."""
