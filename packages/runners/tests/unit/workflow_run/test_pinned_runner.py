from datetime import UTC, datetime

import pytest

from assay_runners.workflow_run.pinned_runner import find_outdated_runner
from packages.runners.tests.fake_programs import Programs


def release(version: str, date: str, **more: object) -> dict[str, object]:
    time = f"{date}T10:00:00Z"
    return {
        "tag_name": f"v{version}", "published_at": time, "draft": False, "prerelease": False, **more
    }  # fmt: skip


PINNED = release("2.338.0", "2026-08-01")


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([], ""),
        ([release("2.337.0", "2026-07-01")], ""),
        ([release("2.339.0", "2026-09-16")], ""),  # jobs until October 16: 15 days are left
        ([release("2.339.0", "2026-09-01", prerelease=True)], ""),
        ([release("2.339.0", "2026-09-01", draft=True)], ""),
        ([release("2.339.0", "2026-09-14")], "from 2026-10-14 on. Write 2.339.0 and"),
        # The first newer release sets the deadline; the message names the last one.
        (
            [release("2.340.0", "2026-09-30"), release("2.339.0", "2026-09-10")],
            "from 2026-10-10 on. Write 2.340.0 and",
        ),
    ],
)
def test_an_outdated_runner_is_reported_two_weeks_before_its_last_job(
    programs: Programs, others: list[dict[str, object]], expected: str
) -> None:
    programs.answers([*others, PINNED])
    found = find_outdated_runner("2.338.0", datetime(2026, 10, 1, 12, tzinfo=UTC))
    assert expected in found
    assert bool(found) is bool(expected)


def test_a_pinned_runner_that_github_does_not_list_is_reported(programs: Programs) -> None:
    programs.answers([PINNED])
    found = find_outdated_runner("2.38.0", datetime(2026, 10, 1, tzinfo=UTC))
    assert "runner 2.38.0 is not among the last 100 releases" in found
