"""Judgment of observations by expectations: ratios, descriptions, verdicts. Imports no torch."""
