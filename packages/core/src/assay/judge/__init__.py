"""Limits, judgment of measured values, and its wording."""
