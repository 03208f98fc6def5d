"""Read the weight files of a model folder, and hash weights."""
