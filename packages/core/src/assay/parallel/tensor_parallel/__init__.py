"""Tensor parallelism for decoders."""
