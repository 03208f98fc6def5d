"""Weights and training states of divided models, read from files and written to them."""
