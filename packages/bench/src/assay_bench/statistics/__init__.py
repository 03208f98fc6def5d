"""Statistical tests of paired items."""
