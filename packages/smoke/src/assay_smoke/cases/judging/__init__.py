"""Judges the answers of a case's worlds, level by level."""
