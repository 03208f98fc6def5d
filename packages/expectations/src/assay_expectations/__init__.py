"""What a model gave on a device, with limits and provenance, and whether it still does."""
