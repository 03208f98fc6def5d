"""The files below `runners/` that describe each vendor's machines, rendered from the entries."""
