"""Trainers of other libraries, for the matrix and `assay check train --candidate-trainer`."""
