"""Sums over every pair of tensors, whatever ranks hold them."""
