"""Estimate time, memory and disk of `assay check generate` before weights are loaded."""
