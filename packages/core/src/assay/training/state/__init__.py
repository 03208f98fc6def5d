"""The state between training steps: parameters, moments, generators, on one rank or many."""
