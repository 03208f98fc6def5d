"""Measure the shapes of a model and the speed of a device, for estimates before weights are loaded."""
