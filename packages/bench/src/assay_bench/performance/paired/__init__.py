"""Two environments measured in turns on one machine, and whether the second is slower."""
