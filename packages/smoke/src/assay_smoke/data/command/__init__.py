"""`assay smoke data`: the process that tries the properties, the verdict, and what is printed."""
