from assay_runners.fleet.entries import Fleet
from assay_runners.planning.rules import make_plan
from packages.runners.tests.event_payloads import dispatch, labeled
from packages.runners.tests.fleet import FLEET


def only(*names: str) -> Fleet:
    vendors = tuple(vendor for vendor in FLEET.vendors if vendor.name in names)
    return FLEET.model_copy(update={"vendors": vendors})


def without_expectations(name: str) -> Fleet:
    """Make the fleet without this session on the machines of one vendor."""
    vendors = [
        one.model_copy(update={"runners": tuple(
            kind.model_copy(update={"sessions": ("check", "smoke")}) for kind in one.runners
        )}) if one.name == name else one
        for one in FLEET.vendors
    ]  # fmt: skip
    return FLEET.model_copy(update={"vendors": tuple(vendors)})


def test_all_is_every_configured_vendor_that_runs_the_tier() -> None:
    every = {vendor.name for vendor in FLEET.vendors}
    for fleet, expected in (
        (without_expectations("gaudi"), every - {"gaudi"}),
        (only("amd", "nvidia"), {"amd", "nvidia"}),
        (only("amd"), {"amd"}),
    ):
        for event in (
            dispatch("recapture.yml", models="micro:llama", vendors="all", reason="x"),
            labeled("expectations:all"),
        ):
            assert {job.target for job in make_plan(event, fleet).machines} == expected


def test_a_machine_that_does_not_run_the_tier_is_refused() -> None:
    fleet = without_expectations("gaudi")
    for event in (
        dispatch("recapture.yml", models="micro:llama", vendors="cpu gaudi", reason="x"),
        labeled("expectations:gaudi"),
    ):
        plan = make_plan(event, fleet)
        assert plan.machines == ()
        assert [one.why for one in plan.refused] == [
            "the machines of gaudi run no session of expectations"
        ]


def test_a_vendor_that_is_not_configured_is_refused_and_never_waited_for() -> None:
    plan = make_plan(labeled("smoke:cuda"), only("amd"))
    assert (plan.tiers, plan.machines) == ((), ())
    assert [one.why for one in plan.refused] == ["there is no machine 'cuda'; there are amd, all"]
