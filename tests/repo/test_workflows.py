"""Workflows and the planner run the sessions that nox has."""

import importlib
from pathlib import Path
from typing import Any

import nox.registry
import pytest
from ruamel.yaml import YAML

from assay_runners.fleet import read_fleet
from assay_runners.planning import BEFORE_MACHINES, FIRST_TIERS, NIGHTLY, TIER_SESSIONS

# Started by hand, by a person at a keyboard.
BY_HAND = {"locked", "published-packages", "rehearse", "zoo"}


@pytest.fixture(scope="module")
def defined() -> set[str]:
    importlib.import_module("noxfile")
    return {name.split("(", maxsplit=1)[0] for name in nox.registry.get()}


def sessions_of_steps(root: Path) -> set[str]:
    """The sessions that workflows name in a command."""
    found: set[str] = set()
    for file in sorted((root / ".github/workflows").glob("*.yml")):
        workflow: dict[str, Any] = YAML(typ="safe").load(file.read_text(encoding="utf-8"))
        for job in workflow["jobs"].values():
            for step in job.get("steps", []):
                words = step.get("run", "").split(" -- ")[0].split()
                if "-s" in words:
                    names = words[words.index("-s") + 1 :]
                    found |= {name for name in names if not name.startswith('"$')}
    return found


def test_the_first_tiers_are_what_nox_alone_runs_and_the_long_tests() -> None:
    noxfile = importlib.import_module("noxfile")
    assert set(FIRST_TIERS) == {*noxfile.nox.options.sessions, "subsystem-long"}
    assert set(BEFORE_MACHINES) < set(FIRST_TIERS)


def test_every_session_is_run_by_a_workflow_and_every_one_run_exists(
    root: Path, defined: set[str]
) -> None:
    planned = {name for names in TIER_SESSIONS.values() for name in names} | {"recapture"}
    of_machines = {name for one in read_fleet(root).runners() for name in one.kind.sessions}
    steps = sessions_of_steps(root)
    assert {"plan", "machine-job", "propose"} <= steps
    assert of_machines <= planned
    run = {*FIRST_TIERS, *NIGHTLY, *planned, *steps}
    assert run - defined == set()
    assert defined - run == BY_HAND


def test_what_is_long_runs_at_night() -> None:
    assert {"faults", "false-alarms", "perf"} <= set(NIGHTLY)
