"""Quantized weights of model folders: unpacked, and compared with the weights they were made from."""
