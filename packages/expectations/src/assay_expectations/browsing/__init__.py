"""The page of all expectations: models by machines, with the newest verdict and git history."""
