"""What was observed against what was captured: ratios, in words, and the verdict. Imports no torch."""
