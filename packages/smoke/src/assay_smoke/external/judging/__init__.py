"""Judges the evidence from a training library's runs."""
