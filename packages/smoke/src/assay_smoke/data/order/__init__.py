"""Which samples each rank sees, in which order, also after a resume."""
