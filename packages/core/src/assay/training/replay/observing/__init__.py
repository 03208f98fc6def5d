"""Observes the values before and after each phase of a trainer's step."""
