"""DeepSpeed as a trainer. Importing this package does not import DeepSpeed."""
