"""One reader for each dump format."""
