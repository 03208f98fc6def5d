"""What a training step starts from and leaves: parameters, moments, generators, on one rank or many."""
