"""Tensors at a module boundary: nested structures, rounding, memory layout, identity."""
