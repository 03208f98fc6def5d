"""Comparing two dumps on disk. No model runs, unless one is given to replay the dumps' inputs."""
