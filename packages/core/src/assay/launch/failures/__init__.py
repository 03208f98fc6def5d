"""How each rank ended, and which of several failures is the cause."""
