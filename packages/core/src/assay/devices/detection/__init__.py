"""What this machine has, asked in a process that vendors' software may hang or crash."""
