"""From what the processes measured to one verdict."""
