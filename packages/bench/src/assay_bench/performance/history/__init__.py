"""Results of many runs on one kind of machine, and where they became slower."""
