"""Trainers of torch's ways to train on several ranks; `assay.training.trainers.registry` knows their names."""
