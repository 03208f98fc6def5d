"""Checks of code that converts messages to ids and labels."""
