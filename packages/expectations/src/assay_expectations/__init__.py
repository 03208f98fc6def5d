"""Expectations: captured outputs of a model on a device, with limits and provenance."""
