"""Tuning: one model trained on a known text, its losses judged by those of other seeds."""
