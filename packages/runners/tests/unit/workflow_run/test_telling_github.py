"""The commands that talk to GitHub and a cloud, with programs in their places that note what they hear."""

import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from assay.errors import MachineError, UsageError
from assay_runners.workflow_run.nightly_issue import TITLE, read_failures, update_issue
from assay_runners.workflow_run.pinned_runner import find_outdated_runner
from assay_runners.workflow_run.reaping import Instance, end_instances, find_expired

RUN = {
    "GITHUB_SERVER_URL": "https://github.example", "GITHUB_REPOSITORY": "o/r",
    "GITHUB_RUN_ID": "5", "GITHUB_SHA": "d" * 40,
}  # fmt: skip
# Notes its words; prints what the file ANSWER holds; exits with 4 where the file REFUSE exists.
PROGRAM = f"""#!{sys.executable}
import json, sys
from pathlib import Path
here = Path(__file__).parent
with open(here / "heard.jsonl", "a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
if (here / "refuse").exists():
    print("HTTP 403: not allowed", file=sys.stderr)
    sys.exit(4)
answer = here / "answer"
asked = bool({{"list", "api", "describe-instances"}} & set(sys.argv))
print(answer.read_text() if answer.exists() and asked else "")
"""


class Programs:
    """gh, aws and the like, all one program."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def answers(self, value: object) -> None:
        (self.folder / "answer").write_text(json.dumps(value))

    def refuse(self) -> None:
        (self.folder / "refuse").touch()

    @property
    def heard(self) -> list[list[str]]:
        file = self.folder / "heard.jsonl"
        lines = file.read_text().splitlines() if file.is_file() else []
        return [json.loads(line) for line in lines]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("gh", "aws"):
        (folder / name).write_text(PROGRAM)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return Programs(folder)


@pytest.mark.parametrize(
    ("results", "failures"),
    [
        ({"plan": "success", "tests": "success"}, []),
        ({"plan": "success", "tests": "skipped"}, []),
        ({"plan": "success", "tests": "failure"}, ["tests: failure"]),
        ({"plan": "success", "tests": "cancelled"}, ["tests: cancelled"]),
        ({"plan": "failure", "tests": "skipped"}, ["plan: failure", "tests: skipped"]),
        ({"plan": "skipped", "tests": "skipped"}, ["plan: skipped", "tests: skipped"]),
    ],
)
def test_a_night_fails_unless_its_plan_and_what_it_chose_succeed(
    results: dict[str, str], failures: list[str]
) -> None:
    needs = {name: {"result": result, "outputs": {}} for name, result in results.items()}
    assert read_failures(json.dumps(needs)) == failures


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"plan": "success"}'])
def test_results_that_say_nothing_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="results of"):
        read_failures(text)


def test_a_first_failure_opens_an_issue(programs: Programs) -> None:
    programs.answers([{"number": 3, "title": "Another"}])
    assert update_issue(["tests: failure"], RUN) == "opened an issue"
    assert programs.heard[1] == ["label", "create", "nightly", "--force"]
    body = programs.heard[2][-1]
    assert programs.heard[2][:4] == ["issue", "create", "--title", TITLE]
    assert "https://github.example/o/r/actions/runs/5" in body
    assert "- tests: failure" in body


def test_a_further_failure_is_added_to_it(programs: Programs) -> None:
    programs.answers([{"number": 9, "title": TITLE}])
    assert update_issue(["tests: failure"], RUN) == "added to issue 9"
    assert programs.heard[1][:3] == ["issue", "comment", "9"]


def test_a_success_closes_it(programs: Programs) -> None:
    programs.answers([{"number": 9, "title": TITLE}])
    assert update_issue([], RUN) == "closed 9"
    assert programs.heard[1][:3] == ["issue", "close", "9"]


def test_a_success_without_an_issue_tells_nothing(programs: Programs) -> None:
    programs.answers([])
    assert update_issue([], RUN) == "nothing to tell"
    assert len(programs.heard) == 1


def test_what_github_refuses_is_told(programs: Programs) -> None:
    programs.refuse()
    with pytest.raises(MachineError, match=r"^gh issue list failed: HTTP 403: not allowed$"):
        update_issue([], RUN)


def release(version: str, date: str, **more: object) -> dict[str, object]:
    time = f"{date}T10:00:00Z"
    return {
        "tag_name": f"v{version}", "published_at": time, "draft": False, "prerelease": False, **more
    }  # fmt: skip


PINNED = release("2.338.0", "2026-08-01")


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ([], ""),
        ([release("2.337.0", "2026-07-01")], ""),
        ([release("2.339.0", "2026-09-16")], ""),  # until the 16th of October: 15 days are left
        ([release("2.339.0", "2026-09-01", prerelease=True)], ""),
        ([release("2.339.0", "2026-09-01", draft=True)], ""),
        ([release("2.339.0", "2026-09-14")], "from 2026-10-14 on. Write 2.339.0 and"),
        # The first that is newer sets the end, the last is the one to take.
        (
            [release("2.340.0", "2026-09-30"), release("2.339.0", "2026-09-10")],
            "from 2026-10-10 on. Write 2.340.0 and",
        ),
    ],
)
def test_two_weeks_before_the_pinned_runner_gets_no_job_it_is_said(
    programs: Programs, others: list[dict[str, object]], told: str
) -> None:
    programs.answers([*others, PINNED])
    found = find_outdated_runner("2.338.0", datetime(2026, 10, 1, 12, tzinfo=UTC))
    assert told in found
    assert bool(found) is bool(told)


def test_a_pinned_runner_that_github_does_not_list_is_no_newest_one(programs: Programs) -> None:
    programs.answers([PINNED])
    found = find_outdated_runner("2.38.0", datetime(2026, 10, 1, tzinfo=UTC))
    assert "runner 2.38.0 is none of the last 100 releases" in found


def test_instances_that_outlived_their_tag_end(programs: Programs) -> None:
    tags = {
        "i-old": "2026-01-01T11:00:00+00:00", "i-new": "2026-01-01T13:00:00+00:00",
        "i-zone": "2026-01-01T12:30:00+01:00", "i-odd": "soon", "i-no-zone": "2026-01-01T11:00:00",
        "i-live": "2026-01-01T13:00:00",
    }  # fmt: skip
    instances = [
        {
            "InstanceId": name,
            "Tags": [{"Key": "Name", "Value": "x"}, {"Key": "assay-expires", "Value": tag}],
        }
        for name, tag in tags.items()
    ]
    programs.answers({"Reservations": [{"Instances": instances[:2]}, {"Instances": instances[2:]}]})
    expired = find_expired(datetime(2026, 1, 1, 12, tzinfo=UTC))
    assert [one.id for one in expired] == ["i-old", "i-zone", "i-odd", "i-no-zone"]
    end_instances(expired)
    ended = [words[-1] for words in programs.heard if words[1] == "terminate-instances"]
    assert ended == ["i-old", "i-zone", "i-odd", "i-no-zone"]


def test_a_cloud_that_refuses_is_no_success(programs: Programs) -> None:
    programs.refuse()
    with pytest.raises(
        MachineError, match=r"^2 of 2 go on:\ni: aws ec2 terminate-instances failed"
    ):
        end_instances([Instance("i", "x"), Instance("j", "x")])
    assert [words[-1] for words in programs.heard] == ["i", "j"]  # one refusal saves no other
