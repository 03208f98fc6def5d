"""Reports of finished runs for the terminal, as HTML, and as Markdown for job summaries."""
