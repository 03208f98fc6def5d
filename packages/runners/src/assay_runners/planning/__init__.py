"""The jobs that a GitHub event starts. Pure: no files, processes or network."""
