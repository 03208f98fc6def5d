"""Which cases of a plan come first, which a session leaves out, and where each is run."""
