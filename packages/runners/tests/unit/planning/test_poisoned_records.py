"""Hostile text in a plan is escaped in logs and in summaries."""

import pytest

from assay.foreign_text import escape_output
from assay_runners.planning.plan import (
    MachineJob,
    Plan,
    Refusal,
    SessionCall,
    TierJob,
    explain_plan,
    summarize_plan,
)
from packages.core.tests.poison import assert_harmless_markdown, assert_harmless_text, poisoned

CALL = SessionCall(session="s", arguments=("a",))
PLAN = Plan(
    event="e", sha="0", nothing="nothing",
    tiers=(TierJob(session="s", python="3.11"),),
    afterwards=(CALL,),
    machines=(
        MachineJob(
            target="cpu", tier="smoke", cards=0, calls=(CALL,), timeout_minutes=1,
            variables={"A": "b"}, why="w",
        ),
    ),
    refused=(Refusal(asked="a", why="w"),),
)  # fmt: skip
PLANS = dict(poisoned(PLAN))


@pytest.mark.parametrize("path", PLANS)
def test_text_in_a_plan_cannot_inject_markup(path: str) -> None:
    assert len(PLANS) >= 10
    assert_harmless_text(escape_output(explain_plan(PLANS[path])))
    assert_harmless_markdown(summarize_plan(PLANS[path]))
