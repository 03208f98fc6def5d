"""Reports of a finished run in three formats: terminal, HTML, Markdown for job summaries."""
