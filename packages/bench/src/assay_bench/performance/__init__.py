"""Speed of a machine, and comparison of the speed of two environments."""
