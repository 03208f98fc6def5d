"""Detect this machine's devices in a separate process, because a vendor's software may hang or crash."""
