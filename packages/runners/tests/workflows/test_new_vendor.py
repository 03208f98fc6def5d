"""A new vendor needs one entry; the committed workflows accept its jobs."""

import json
import shutil
from pathlib import Path

import pytest

from assay_runners.checking.rules import check_workflows
from assay_runners.fleet import RUNNERS_FILE, Fleet, read_fleet
from assay_runners.planning import make_plan
from packages.runners.tests.event_payloads import HEAD, labeled
from packages.runners.tests.fleet import ROOT
from packages.runners.tests.github_parser.workflows import EventCase, evaluate

ENTRY = """
[acme]
title = "Acme"
resources = ["acme.example/card"]
shown.by = ["dev/acme/[0-9]*"]
torch = { from_registry = false, plugin = "torch_acme" }
image.base = ""
health = { command = ["acme-smi", "--list"], card_pattern = "^card" }
runners = [
  { cards = 1, sessions = ["check", "smoke"], timeout_minutes = 60, budget_minutes = 30, max_runners = 1 },
  { cards = 8, sessions = ["smoke"], timeout_minutes = 90, budget_minutes = 60, max_runners = 1 },
]
unverified = ["image", "health"]
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Copy the repository and add one entry."""
    for name in (".github", "runners"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "noxfile.py", tmp_path)
    with (tmp_path / RUNNERS_FILE).open("a", encoding="utf-8") as file:
        file.write(ENTRY)
    return tmp_path


@pytest.fixture
def fleet(root: Path) -> Fleet:
    return read_fleet(root)


def test_the_label_of_a_new_vendor_starts_a_job_on_its_machine(root: Path, fleet: Fleet) -> None:
    event = labeled("smoke:acme-8")
    plan = make_plan(event, fleet)
    (machine,) = plan.machines
    assert (machine.target, machine.cards, machine.timeout_minutes) == ("acme-8", 8, 90)
    assert [call.arguments for call in machine.calls] == [("--budget", "60m", "--cards", "8")]
    lists = {
        "tiers": json.dumps([job.model_dump() for job in plan.tiers]),
        "machines": json.dumps([job.model_dump() for job in plan.machines]),
    }
    github = {
        "sha": event.sha, "ref": event.ref, "repository": fleet.github.repository, "run_id": "1",
    }  # fmt: skip
    case = EventCase(
        name="new", event_name=event.name, event=event.payload, github=github,
        outputs={"smoke.yml": {"plan": lists, "plan / plan": lists}},
    )  # fmt: skip
    (found,) = evaluate(root, [case])
    (job,) = (job for job in found.jobs if job.runs_on.group)
    assert job.runs_on.labels == ("assay-acme-8",)
    assert job.environment == "assay-acme-8"
    assert (job.checkouts, job.timeout_minutes) == ((HEAD,), 90)


def test_a_new_vendor_needs_no_edit_of_a_workflow(root: Path, fleet: Fleet) -> None:
    assert check_workflows(root, fleet) == []
