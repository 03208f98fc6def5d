"""Signs that a dump does not hold a whole run."""
