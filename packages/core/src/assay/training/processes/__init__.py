"""The processes of `assay check train`: who asks, who runs, what they tell each other."""
