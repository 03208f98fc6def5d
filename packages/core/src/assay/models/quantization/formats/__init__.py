"""Formats of quantized weights, one file per family."""
