"""Traces behind URLs that fsspec opens, with the same files as in a local folder.

`writing` spools files locally and uploads them in the background; `reading` copies a trace into a
local folder.
"""
