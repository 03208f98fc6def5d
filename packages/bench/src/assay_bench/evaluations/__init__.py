"""Evaluations: answers of a model to tasks, read from lm-eval's files. Imports no torch."""
