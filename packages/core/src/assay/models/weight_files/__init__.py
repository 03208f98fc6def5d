"""What lies in the weight files of a model folder, and its hashes."""
