"""The readers of this package for the fuzz session: fleet, events, workflows."""

import json
import shutil
from pathlib import Path

from assay_runners.checking.rules import check_workflows
from assay_runners.fleet import read_fleet
from assay_runners.planning import explain_plan, make_plan
from assay_runners.rendering import render_fleet
from assay_runners.workflow_run import read_event
from packages.core.tests.fuzz.reader import Reader
from packages.runners.tests.event_payloads import pull_request, recorded
from packages.runners.tests.fleet import FLEET

_ROOT = Path(__file__).resolve().parents[3]


def _write_fleet(folder: Path) -> None:
    shutil.copytree(_ROOT / "runners", folder / "runners", ignore=_not_toml)


def _not_toml(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not name.endswith(".toml")]


def _read_fleet(folder: Path) -> object:
    fleet = read_fleet(folder)
    return fleet, render_fleet(fleet)


def _write_event(folder: Path) -> None:
    event = pull_request("labeled", label="smoke:nvidia", labels=["smoke:nvidia"])
    (folder / "event.json").write_text(json.dumps(recorded(event)))


def _plan(folder: Path) -> object:
    event = read_event(str(folder / "event.json"), {})
    return explain_plan(make_plan(event, FLEET))


def _write_payload(folder: Path) -> None:
    (folder / "payload.json").write_text(json.dumps(pull_request("opened").payload))


def _plan_payload(folder: Path) -> object:
    """Plan as in a workflow run, with the event in the environment."""
    variables = {
        "GITHUB_EVENT_PATH": str(folder / "payload.json"),
        "GITHUB_EVENT_NAME": "pull_request",
    }
    plan = make_plan(read_event("", variables), FLEET)
    return explain_plan(plan)


def _write_workflows(folder: Path) -> None:
    shutil.copytree(_ROOT / ".github" / "workflows", folder / ".github" / "workflows")
    shutil.copytree(_ROOT / ".github" / "actions", folder / ".github" / "actions")


def _check(folder: Path) -> object:
    found = check_workflows(folder, read_fleet(_ROOT))
    return [str(one) for one in found]


READERS = (
    Reader("fleet", _write_fleet, _read_fleet),
    Reader("event", _write_event, _plan),
    Reader("event-payload", _write_payload, _plan_payload),
    Reader("workflows", _write_workflows, _check, mutated=(".github/**/*.yml",)),
)
