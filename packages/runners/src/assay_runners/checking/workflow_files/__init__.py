"""Workflow files: their values with line numbers, and their expressions."""
