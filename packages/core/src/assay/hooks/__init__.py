"""What watches a running model: its module calls, gradients and tensors, without changing them."""
