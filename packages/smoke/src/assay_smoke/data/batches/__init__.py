"""Checks of collators, padded or packed."""
