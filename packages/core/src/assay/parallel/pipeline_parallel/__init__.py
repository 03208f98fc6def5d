"""Decoders cut into pipeline stages, and their schedules."""
