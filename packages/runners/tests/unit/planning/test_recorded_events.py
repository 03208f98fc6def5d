from pathlib import Path

import pytest

from assay_runners.fleet.reading import read_fleet
from assay_runners.planning.rules import make_plan
from assay_runners.workflow_run.events import read_event
from packages.runners.tests.fleet import ROOT

EVENTS = sorted((ROOT / "examples/events").iterdir())
NUM_TIERS = {
    "dispatch-bench": 0, "dispatch-recapture": 0, "documentation": 0, "opened": 14,
    "push-main": 14, "schedule-nightly": 8,
}  # fmt: skip


@pytest.mark.parametrize("file", EVENTS, ids=lambda file: file.stem)
def test_each_example_starts_the_jobs_of_its_name(file: Path) -> None:
    event, fleet = read_event(str(file), {}), read_fleet(ROOT)
    asked = f"{event.inputs.get('vendor', '')} {event.inputs.get('vendors', '')}".split()
    session = "bench" if "vendor" in event.inputs else "expectations"
    able = {one.target for one in fleet.runners() if session in one.kind.sessions}
    plan = make_plan(event, fleet)
    assert len(plan.tiers) == NUM_TIERS[file.stem]
    assert [job.target for job in plan.machines] == [name for name in asked if name in able]


def test_every_example_has_a_test() -> None:
    assert {file.stem for file in EVENTS} == set(NUM_TIERS)
