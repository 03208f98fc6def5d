"""Capturing the processes of a command, without a change to its script. Imports no torch."""
