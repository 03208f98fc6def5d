"""What a model is worth on tasks, and whether that went down."""
