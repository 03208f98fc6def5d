"""Trainers for torch's kinds of parallelism, and the registry of their names."""
