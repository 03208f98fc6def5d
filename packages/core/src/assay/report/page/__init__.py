"""The HTML page of a report: one file with its pictures, tables and templates."""
