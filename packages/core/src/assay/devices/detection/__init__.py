"""Detecting this machine's devices in a process that a vendor's software may hang or crash."""
