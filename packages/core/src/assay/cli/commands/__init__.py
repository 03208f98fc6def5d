"""One file for each command of `assay`."""
