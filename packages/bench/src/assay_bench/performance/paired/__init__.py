"""Comparison of the speed of two environments that take turns on one machine."""
