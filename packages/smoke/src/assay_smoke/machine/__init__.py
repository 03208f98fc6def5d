"""What a run takes of its machine, and what it leaves behind: processes, ports, files, memory."""
