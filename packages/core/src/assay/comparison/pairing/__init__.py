"""Pairing of two dumps: their passes and tokens, ports, and experts."""
