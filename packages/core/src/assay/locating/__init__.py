"""Which stage made an error, and which operation in it."""
