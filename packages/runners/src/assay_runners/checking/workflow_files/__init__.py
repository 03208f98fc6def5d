"""Workflow files: their values with line numbers, their expressions, and which workflow calls which."""
