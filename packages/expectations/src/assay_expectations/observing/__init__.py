"""Observation of a model and its yardstick, in the process that runs them."""
