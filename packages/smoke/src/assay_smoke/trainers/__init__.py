"""Trainers of other libraries, as `assay check train --candidate-trainer` and the matrix run them."""
