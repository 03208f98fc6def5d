"""Reading tensors that any tool has dumped."""
