from pathlib import Path

from assay_runners.fleet.entries import Fleet
from assay_runners.fleet.reading import read_fleet
from assay_runners.planning.rules import make_plan
from packages.runners.tests.event_payloads import dispatch, labeled

ROOT = Path(__file__).resolve().parents[5]


def without(session: str, vendor: str) -> Fleet:
    """Read the fleet without a session on the machines of `vendor`."""
    fleet = read_fleet(ROOT)
    vendors = [
        one.model_copy(update={"runners": tuple(
            kind.model_copy(update={"sessions": tuple(set(kind.sessions) - {session})})
            for kind in one.runners
        )}) if one.name == vendor else one
        for one in fleet.vendors
    ]  # fmt: skip
    return fleet.model_copy(update={"vendors": tuple(vendors)})


def test_all_leaves_out_machines_that_do_not_run_the_tier() -> None:
    fleet = without("expectations", "gaudi")
    every = {vendor.name for vendor in fleet.vendors}
    for event in (
        dispatch("recapture.yml", models="micro:llama", vendors="all", reason="x"),
        labeled("expectations:all"),
    ):
        assert {job.target for job in make_plan(event, fleet).machines} == every - {"gaudi"}


def test_a_machine_that_does_not_run_the_tier_is_refused() -> None:
    fleet = without("expectations", "gaudi")
    for event in (
        dispatch("recapture.yml", models="micro:llama", vendors="cpu gaudi", reason="x"),
        labeled("expectations:gaudi"),
    ):
        plan = make_plan(event, fleet)
        assert plan.machines == ()
        assert [one.why for one in plan.refused] == [
            "the machines of gaudi run no session of expectations"
        ]
