"""Which combinations of features there are, which can run, and which of them a session runs.

Pure: nothing here needs torch or the device that is planned for.
"""
