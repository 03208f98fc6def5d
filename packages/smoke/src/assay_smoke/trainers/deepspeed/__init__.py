"""DeepSpeed as a trainer that a training check can run. Importing it does not import DeepSpeed."""
