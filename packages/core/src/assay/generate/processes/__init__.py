"""The processes of `assay check generate`: who asks, who runs, what they tell each other."""
