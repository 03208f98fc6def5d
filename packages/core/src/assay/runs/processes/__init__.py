"""Work in other processes, which isolates what it patches, allocates or breaks.

One fork server starts them all: single processes that answer a request (`ask`), and the ranks of
`assay.launch`. They end with this process, however it ends.
"""

from assay.runs.processes.asking import ask
from assay.runs.processes.remote_function import RemoteFunction

__all__ = ["RemoteFunction", "ask"]
