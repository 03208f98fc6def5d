"""Stand-in of torch_xla.core."""
