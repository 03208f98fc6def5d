"""Tokenizers and conversations for checks, and the display of tokens."""
