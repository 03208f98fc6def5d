"""One training step, observed from outside and replayed from the reference's values."""
