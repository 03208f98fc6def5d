"""Code for workflow runs on GitHub: their events, outputs, summaries and calls of GitHub."""
