"""One verdict of what was measured."""
