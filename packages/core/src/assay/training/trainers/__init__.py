"""Trainers of torch's ways to train on several ranks; `assay.training.opening` knows their names."""
