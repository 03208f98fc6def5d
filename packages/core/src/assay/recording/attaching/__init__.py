"""Capturing the processes of an unchanged command. Importing it imports no torch."""
