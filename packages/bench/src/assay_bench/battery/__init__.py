"""The tasks that are shipped: made here from the standard library's text and from arithmetic. No network."""
