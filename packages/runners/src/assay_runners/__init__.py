"""Which machines run what for an event of GitHub, and how a machine becomes such a runner."""
