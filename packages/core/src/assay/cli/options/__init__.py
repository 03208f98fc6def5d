"""Options that several commands share, or that exclude one another."""
