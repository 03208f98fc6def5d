"""Runs lm-eval, as a library, on a model that assay loads or on any of lm-eval's own backends."""
