"""Published and custom metrics of tensor pairs, and their table."""
