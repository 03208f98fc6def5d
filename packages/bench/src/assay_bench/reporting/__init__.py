"""What is written of a comparison: verdict, JSON, Markdown, page. Imports no torch."""
