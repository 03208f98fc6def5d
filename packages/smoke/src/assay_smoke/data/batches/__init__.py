"""From samples to batches, padded or packed."""
