"""The settings that connect a checkout with an organization on GitHub."""
