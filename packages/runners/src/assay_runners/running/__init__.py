"""Runs what was planned for a machine, and says how it went; the rehearsal runs the same code."""
