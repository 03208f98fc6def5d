"""What runs where for an event of GitHub; nothing here reads files, runs a process or the network."""
