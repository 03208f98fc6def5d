"""Task scores and speed of models, and comparisons of both."""
