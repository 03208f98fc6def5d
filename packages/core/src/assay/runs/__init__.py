"""Folder, provenance, progress and processes of a run. Imports neither torch nor transformers."""

from assay.progress import Progress, SilentProgress, Task
from assay.runs.errors import FolderError, ProcessError
from assay.runs.folders import RunFolder, removed_if_refused
from assay.runs.processes import RemoteFunction, ask
from assay.runs.progress.display import LineProgress, open_progress
from assay.runs.provenance import provenance

__all__ = [
    "FolderError",
    "LineProgress",
    "ProcessError",
    "Progress",
    "RemoteFunction",
    "RunFolder",
    "SilentProgress",
    "Task",
    "ask",
    "open_progress",
    "provenance",
    "removed_if_refused",
]
