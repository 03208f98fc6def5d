"""One page over all expectations: models by machines, what was last seen of each, its history."""
