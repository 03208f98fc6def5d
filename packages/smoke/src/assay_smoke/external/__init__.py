"""Runs and judges a training library by its own command line, as a TOML file describes it."""
