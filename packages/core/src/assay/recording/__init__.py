"""Recording module calls, gradients, operations and parameters of a run into a trace."""
