"""Processes of a check: each does one piece of work and answers in JSON."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from assay.runs import Answer, Progress, run_process

WORKER = "assay.generate.processes.worker"
# What both sides import before they run: a check then pays for it once.
PRELOAD = ("assay.generate.processes.preload",)


@dataclass(frozen=True, slots=True)
class Workers:
    """Runs work in processes of their own; their logs lie in `folder`."""

    folder: Path
    progress: Progress

    def ask(
        self,
        kind: Literal["setup", "capture", "candidate", "operations", "equivalence"],
        request: dict[str, Any],
        name: str,
    ) -> Answer:
        """Have one piece of work done. Raises: as `run_process`."""
        return run_process(
            WORKER,
            {"kind": kind, "request": request},
            self.folder,
            name=name,
            progress=self.progress,
            preload=PRELOAD,
        )
