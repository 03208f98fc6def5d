"""The machines there are: what `runners/runners.toml` and `runners/github.toml` say of them."""
