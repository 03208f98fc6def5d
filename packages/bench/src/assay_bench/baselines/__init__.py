"""Evaluations that were accepted: what later ones are held to. Imports no torch."""
