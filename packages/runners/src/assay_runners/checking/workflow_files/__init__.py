"""The files that rules look at: their values with lines, their expressions, and who calls whom."""
