"""Tuning: models trained on a known text, with losses compared to other seeds."""
