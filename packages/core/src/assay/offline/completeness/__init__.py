"""Signs in a single dump that it does not hold a whole run."""
