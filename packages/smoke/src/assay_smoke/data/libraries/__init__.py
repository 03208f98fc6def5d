"""What installed libraries offer for the data side, in the protocols that users' code has."""
