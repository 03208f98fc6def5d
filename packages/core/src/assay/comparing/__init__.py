"""What recorded values mean: pairing them, judging them, and the words for it."""
