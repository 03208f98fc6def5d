"""Suites and tasks. The offline tasks use the standard library's text and arithmetic."""
