"""The processes of `assay check train`, with their requests and reports."""
