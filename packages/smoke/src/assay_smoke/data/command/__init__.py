"""The process, verdict and output of `assay smoke data`."""
