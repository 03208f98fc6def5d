"""The formats of quantized weights, one file a family."""
