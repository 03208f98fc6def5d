"""Runs of lm-eval: as a library on a model that assay loads, or by its command line on any backend."""
