"""Stand-in of neuronxcc, the compiler."""
