"""Processes, ports, shared memory and files that the ranks of a case leave behind."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from assay.comparing.levels import LevelResult
from assay.errors import name_some
from assay.launch import start_ahead
from assay.verdicts import Level, Outcome
from assay_smoke.machine.leftovers import Leftover, Snapshot, find_leftovers
from assay_smoke.machine.process_tree import ProcessTree

_TEMPORARY = "TMPDIR"


@contextmanager
def record_leftovers(temporary: Path, found: list[Leftover]) -> Iterator[None]:
    """Add to `found` what worlds within the block leave behind, then end their processes.

    temporary: the TMPDIR of the worlds.
    """
    start_ahead()  # otherwise the fork server and the watchdog would count as leftovers
    temporary.mkdir(parents=True, exist_ok=True)
    tree = ProcessTree()
    before = Snapshot.take(temporary)
    kept = {name: os.environ.get(name) for name in (*tree.environment, _TEMPORARY)}
    os.environ.update(tree.environment)
    os.environ[_TEMPORARY] = str(temporary.resolve())
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        try:
            found += find_leftovers(before, tree)
        finally:
            tree.kill()


def judge_leftovers(found: list[Leftover]) -> LevelResult:
    """Fail if anything was left behind."""
    outcome = Outcome.FAIL if found else Outcome.PASS
    reason = name_some([str(one) for one in found]) if found else None
    return LevelResult(Level(verdict=outcome, reason=reason, compared=1))
