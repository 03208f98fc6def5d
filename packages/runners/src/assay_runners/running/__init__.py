"""Runs planned jobs and summarizes them. The rehearsal uses the same code."""
