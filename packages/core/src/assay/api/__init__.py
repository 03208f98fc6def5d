"""The Python API, from which the command line derives its commands. Imports no torch."""
