"""What adapters over torch share: seeds, the precision of float32 products, the host's memory."""
