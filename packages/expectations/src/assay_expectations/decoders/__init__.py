"""Comparison of decoders on a device with the reference, over many input shapes."""
