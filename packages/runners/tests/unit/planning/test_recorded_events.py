from pathlib import Path

import pytest

from assay_runners.planning.rules import make_plan
from assay_runners.workflow_run.events import read_event
from packages.runners.tests.fleet import FLEET, ROOT

STARTS = {
    "dispatch-bench": (0, ["nvidia"]),
    "dispatch-recapture": (0, ["nvidia", "spyre"]),
    "documentation": (0, []),
    "opened": (14, []),
    "push-main": (14, []),
    "schedule-nightly": (8, []),
}


@pytest.mark.parametrize(
    "file", sorted((ROOT / "examples/events").iterdir()), ids=lambda file: file.stem
)
def test_each_example_starts_the_jobs_of_its_name(file: Path) -> None:
    plan = make_plan(read_event(str(file), {}), FLEET)
    assert (len(plan.tiers), [job.target for job in plan.machines]) == STARTS[file.stem]


def test_every_example_has_a_test() -> None:
    assert {file.stem for file in (ROOT / "examples/events").iterdir()} == set(STARTS)
