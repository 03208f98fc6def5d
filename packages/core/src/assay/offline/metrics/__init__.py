"""Published and custom metrics of tensor pairs."""
