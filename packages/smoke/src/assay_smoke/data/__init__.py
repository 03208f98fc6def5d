"""Checks of the data side of training, from messages to the loss's label tokens."""
