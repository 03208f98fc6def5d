"""Progress of tasks, sent from a child process and shown on a terminal or in a log."""
