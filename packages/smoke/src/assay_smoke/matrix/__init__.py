"""Combinations of features: which exist, which can run, and which a session runs.

Nothing here needs torch or a device.
"""
