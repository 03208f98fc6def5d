"""Launches, watches and ends one run of a training library."""
