"""Judges the measurements of the processes, and combines them into one verdict."""
