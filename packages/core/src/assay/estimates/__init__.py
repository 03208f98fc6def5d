"""What a model needs on this machine, estimated before its weights are loaded."""
