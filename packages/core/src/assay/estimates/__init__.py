"""Estimates of time, memory and disk, made before the weights of a model are loaded."""
