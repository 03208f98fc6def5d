"""Decoders cut into the stages of a pipeline, and their schedules."""
