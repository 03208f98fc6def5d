"""Whether one model is as it was captured: its output, its weights, and how these are laid out."""
