"""The processes of `assay check generate`: their requests, what they run, their reports."""
