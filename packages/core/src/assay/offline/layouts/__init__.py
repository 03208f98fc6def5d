"""Placements of tensors over ranks: declared, or found from shapes and values."""
