"""Tensor and sequence parallelism for decoders."""
