"""The HTML page of a report: pictures, tables and templates, in one file."""
