"""Unpack quantized weights of model folders, and compare them with the original weights."""
