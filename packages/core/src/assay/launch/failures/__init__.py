"""What became of each rank, and which of several failures is the cause."""
