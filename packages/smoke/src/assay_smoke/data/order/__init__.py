"""Checks of the sample order of each rank, also after a resume."""
