"""The machines that `runners/runners.toml` and `runners/github.toml` describe."""
