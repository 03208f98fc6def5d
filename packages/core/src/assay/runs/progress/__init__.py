"""Tasks on their way from a child process to a terminal or a log."""
