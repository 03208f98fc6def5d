"""What GitHub's own packages make of the workflows for an event: a second answer beside planning."""
