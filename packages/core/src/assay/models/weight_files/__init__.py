"""Reading the weight files of a model folder, and hashing weights."""
