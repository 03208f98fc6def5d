"""Decoders divided over the ranks of a tensor-parallel axis."""
