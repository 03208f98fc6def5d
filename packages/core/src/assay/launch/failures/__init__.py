"""The end of each rank, and the cause among several failures."""
