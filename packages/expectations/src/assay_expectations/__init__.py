"""Goldens with thresholds and provenance, and the commands that capture and verify them."""
