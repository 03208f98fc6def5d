"""Folder, provenance and progress of a run. Imports neither torch nor transformers."""

from assay.progress import Progress, SilentProgress, Task
from assay.runs.folders import FolderError, RunFolder, removed_if_refused
from assay.runs.progress import LineProgress, open_progress
from assay.runs.provenance import changed_packages, describe_packages, provenance

__all__ = [
    "FolderError",
    "LineProgress",
    "Progress",
    "RunFolder",
    "SilentProgress",
    "Task",
    "changed_packages",
    "describe_packages",
    "open_progress",
    "provenance",
    "removed_if_refused",
]
