"""Functions shared by adapters: seeds, precision of float32 products, the host's memory."""
