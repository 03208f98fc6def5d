"""One model of a finished run, three faces: terminal, HTML, Markdown for job summaries."""
