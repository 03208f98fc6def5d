"""Decoders cut into pipeline stages, and training over them."""
