"""A failure as a folder that fails by itself, with torch alone.

`script` writes two programs as Python code, and `folder` makes their inputs smaller and writes
reproduce.py with its tensors. The text that is written is the text that is run here to decide whether it fails.
"""
