"""Sums over every pair of tensors on all ranks."""
