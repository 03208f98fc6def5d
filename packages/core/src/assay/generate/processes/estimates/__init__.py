"""Time, memory and disk of a check, estimated before anything large is loaded."""
