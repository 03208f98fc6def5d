"""Placements of tensors over ranks, declared or detected from shapes and values."""
