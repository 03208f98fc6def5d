"""Tokenizers and conversations to check with, and how their tokens are shown."""
