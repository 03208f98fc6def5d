"""Reports on comparisons: verdict, JSON, Markdown, HTML. Imports no torch."""
