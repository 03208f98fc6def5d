"""Comparison of two dumps on disk, without running a model, except to replay their inputs."""
