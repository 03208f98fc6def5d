"""Judgment of measurements: location, cause and verdict."""
