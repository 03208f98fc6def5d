"""A run's use of its machine: processes, ports, files and memory, and what it leaves behind."""
