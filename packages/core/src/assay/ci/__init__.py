"""Checks of another repository in its CI: what a label starts, and how a job runs it."""
