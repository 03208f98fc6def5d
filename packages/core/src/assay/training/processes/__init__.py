"""The processes of `assay check train`: their requests, what they run, their reports."""
