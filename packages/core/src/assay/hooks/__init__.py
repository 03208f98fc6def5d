"""Hooks on a running model: its module calls, gradients, operations and tensors."""
