"""Tuning: models trained on a known text."""
