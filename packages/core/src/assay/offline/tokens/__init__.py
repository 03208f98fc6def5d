"""The tokens of dumps: forward passes, prompts, positions and ids."""
