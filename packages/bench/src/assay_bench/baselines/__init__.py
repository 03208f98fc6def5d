"""Accepted evaluations, which later ones are compared with. Imports no torch."""
