"""The checks as functions, with the options of the command line, which calls them.

Importing this package imports no torch, and nothing that only the end of a check needs.
"""
