"""Issues of the nightly run, and expired cloud instances."""

import http.server
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from assay.errors import MachineError, UsageError
from assay_runners.commands import app
from assay_runners.upkeep import (
    NIGHT_FAILS,
    RUNNER_IS_OLD,
    end_instances,
    find_expired,
    find_outdated_runner,
    read_failures,
    update_issue,
)
from assay_runners.workflow_run import run_program
from packages.runners.tests.fake_programs import Programs

ROOT = Path(__file__).resolve().parents[4]
RUN = {
    "GITHUB_SERVER_URL": "https://github.example", "GITHUB_REPOSITORY": "o/r",
    "GITHUB_RUN_ID": "5", "GITHUB_SHA": "d" * 40,
}  # fmt: skip


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
def test_a_night_fails_unless_its_plan_and_its_jobs_succeed(
    results: dict[str, str], failures: list[str]
) -> None:
    needs = {name: {"result": result, "outputs": {}} for name, result in results.items()}
    assert read_failures(json.dumps(needs)) == failures


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"plan": "success"}'])
def test_results_without_jobs_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="results of"):
        read_failures(text)


OPEN = {"number": 9, "title": NIGHT_FAILS}


@pytest.mark.parametrize(
    ("title", "reasons", "listed", "expected", "words"),
    [
        (
            NIGHT_FAILS,
            ["tests: failure"],
            [],
            "opened an issue",
            ["create", "--title", NIGHT_FAILS],
        ),
        (NIGHT_FAILS, ["tests: failure"], [OPEN], "commented on issue 9", ["comment", "9"]),
        (NIGHT_FAILS, [], [OPEN], "closed 9", ["close", "9"]),
        (NIGHT_FAILS, [], [], "no", ["list"]),
        (RUNNER_IS_OLD, ["x"], [OPEN], "opened an issue", ["create", "--title", RUNNER_IS_OLD]),
    ],
)
def test_an_issue_is_opened_commented_on_or_closed(
    programs: Programs,
    title: str,
    reasons: list[str],
    listed: list[dict[str, object]],
    expected: str,
    words: list[str],
) -> None:
    programs.answers(listed)
    assert update_issue(title, reasons, RUN) == f"{title}: {expected}"
    assert programs.heard[-1][: len(words) + 1] == ["issue", *words]
    if reasons:
        assert "https://github.example/o/r/actions/runs/5" in programs.heard[-1][-1]
        assert f"- {reasons[0]}" in programs.heard[-1][-1]


def test_a_refusal_of_github_is_an_error(programs: Programs) -> None:
    programs.refuse()
    with pytest.raises(MachineError, match=r"^gh issue list failed: HTTP 403: not allowed$"):
        update_issue(NIGHT_FAILS, [], RUN)


def test_gh_gets_the_server_of_the_workflow_run(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    (programs.folder / "gh").write_text('#!/bin/sh\necho "$GH_HOST $GH_ENTERPRISE_TOKEN"\n')
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://git.example")
    monkeypatch.setenv("GH_TOKEN", "token")
    assert run_program("gh", "api", "x") == "git.example token\n"


def test_outside_a_workflow_run_nothing_is_sent(programs: Programs) -> None:
    with pytest.raises(UsageError, match=r"^GITHUB_SERVER_URL is not set: this command belongs to"):
        update_issue(NIGHT_FAILS, ["x"], {})
    assert programs.heard == []


def test_unreadable_releases_do_not_fail_the_night(programs: Programs) -> None:
    programs.answers([])
    programs.refuse("api")
    results = json.dumps({"plan": {"result": "success"}})
    words = ["report-nightly", "--results", results, "--root", str(ROOT)]
    done = CliRunner().invoke(app, words, env=RUN)
    assert done.exit_code == 0
    night, warning = done.stdout.splitlines()
    assert night == f"{NIGHT_FAILS}: no"
    assert warning.startswith("::warning::the age of runner ")
    assert [words[0] for words in programs.heard] == ["issue", "api"]


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


def test_expired_instances_are_terminated(programs: Programs) -> None:
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
    assert list(expired) == ["i-old", "i-zone", "i-odd", "i-no-zone"]
    end_instances(expired)
    ended = [words[-1] for words in programs.heard if words[1] == "terminate-instances"]
    assert ended == ["i-old", "i-zone", "i-odd", "i-no-zone"]


def test_a_refusal_of_the_cloud_is_an_error(programs: Programs) -> None:
    programs.refuse()
    with pytest.raises(
        MachineError, match=r"^2 of 2 still run:\ni: aws ec2 terminate-instances failed"
    ):
        end_instances(["i", "j"])
    assert [words[-1] for words in programs.heard] == ["i", "j"]


CUT_OFF = b'{"value": "to'


@pytest.fixture
def identities() -> Iterator[tuple[str, list[bytes]]]:
    """Serve GitHub's identity service on loopback. Returns: its address and its pending answers."""
    answers: list[bytes] = []

    class Service(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.pop(0)
            self.send_response(200 if answer else 500)
            if answer.endswith(CUT_OFF):
                self.send_header("Content-Length", "999")
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/?x=1", answers
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("wrong", [b"", b"{}", b"[]", b"no JSON", CUT_OFF])
def test_a_refused_identity_stops_no_other_termination(
    programs: Programs,
    identities: tuple[str, list[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    wrong: bytes,
) -> None:
    address, answers = identities
    monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_URL", address)
    monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_TOKEN", "x")
    monkeypatch.setenv("ASSAY_REAPER_ROLE", "role")
    answers += [wrong, json.dumps({"value": "token"}).encode()]
    with pytest.raises(
        MachineError, match=r"^1 of 2 still run:\ni: GitHub gives the run no identity"
    ):
        end_instances(["i", "j"])
    assert [words[-1] for words in programs.heard] == ["j"]
