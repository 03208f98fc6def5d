"""In the process that runs the model: its distributions, the yardstick's, and what was run."""
