"""Checks of one model: its outputs, its weights, and other layouts of them."""
