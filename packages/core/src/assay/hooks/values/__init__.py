"""What is done with single tensors at a boundary."""
