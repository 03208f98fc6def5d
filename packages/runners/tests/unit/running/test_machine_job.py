import json
import os
import sys
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay_runners.planning.plan import MachineJob, SessionCall
from assay_runners.running.machine_job import SICK, Checkout, run_machine_job, summarize_job
from packages.runners.tests.fake_programs import NOX, verdict
from packages.runners.tests.fleet import FLEET, write_fleet

SHA = "f" * 40

# Replaces a vendor's program: prints the file `cards`, or exits with 9 if it is missing.
SMI = """#!/bin/sh
[ -f cards ] || { echo "no driver" >&2; exit 9; }
cat cards
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nox.py").write_text(NOX)
    write_fleet(tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "nvidia-smi").write_text(SMI)
    (programs / "nvidia-smi").chmod(0o755)
    (tmp_path / "cards").write_text("0, 4, 0\n1, 4, [N/A]\n")
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    for session in ("smoke", "expectations"):
        (tmp_path / f"{session}.left").write_text(verdict("PASS"))
    return Checkout(tmp_path, (sys.executable, "nox.py"))


def job(cards: int = 1, **variables: str) -> MachineJob:
    calls = (
        SessionCall(session="smoke", arguments=("--budget", "30m", "--cards", str(cards))),
        SessionCall(session="expectations"),
    )
    target = "nvidia" if cards == 1 else f"nvidia-{cards}"
    return MachineJob(
        target=target, tier="smoke", cards=cards, calls=calls, timeout_minutes=60,
        variables=variables, why=f"the label smoke:{target}",
    )  # fmt: skip


def asked(checkout: Checkout) -> list[list[object]]:
    file = checkout.root / "asked.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def test_all_sessions_run_with_their_arguments_and_variables(checkout: Checkout) -> None:
    result = run_machine_job(job(SEEN="yes"), FLEET, checkout)
    assert result.exit_code == 0
    assert asked(checkout) == [
        [["-s", "smoke", "--", "--budget", "30m", "--cards", "1"], "yes"],
        [["-s", "expectations"], "yes"],
    ]
    # The cases inside a run do not count as runs.
    assert [len(session.runs) for session in result.sessions] == [1, 1]
    assert "# smoke on assay-nvidia: passes" in summarize_job(result, SHA)


def test_the_next_session_runs_after_a_failed_one(checkout: Checkout) -> None:
    (checkout.root / "smoke.code").write_text("1")
    result = run_machine_job(job(), FLEET, checkout)
    assert result.exit_code == 1
    assert [session.failure for session in result.sessions] == ["exit code 1", ""]
    summary = summarize_job(result, SHA)
    assert f"git checkout {SHA}\nnox -s smoke -- --budget 30m --cards 1\n```" in summary


def test_a_summary_starts_with_the_worst_report(checkout: Checkout) -> None:
    (checkout.root / "expectations.left").write_text(verdict("FAIL"))
    (checkout.root / "expectations.code").write_text("1")
    summary = summarize_job(run_machine_job(job(), FLEET, checkout), SHA)
    assert "# smoke on assay-nvidia: FAILS" in summary
    failed, passed = summary.index("down_proj"), summary.rindex("PASS")
    assert failed < passed, "the worst report comes first"


def test_a_summary_names_the_environment(checkout: Checkout) -> None:
    summary = summarize_job(run_machine_job(job(), FLEET, checkout), SHA)
    expected = "Python 3.12.3, torch 2.9.0, image acme/torch' # @1"
    assert f"\n\nEnvironment: `{expected}`.\n\n" in summary


def test_a_fail_verdict_fails_a_session_that_exits_with_0(checkout: Checkout) -> None:
    (checkout.root / "expectations.left").write_text(verdict("FAIL"))
    result = run_machine_job(job(), FLEET, checkout)
    assert result.exit_code == 1
    assert result.sessions[1].failure == "made-by-expectations says FAIL"


def test_a_truncated_verdict_fails_the_session_and_keeps_the_summary(checkout: Checkout) -> None:
    (checkout.root / "expectations.left").write_text(verdict("PASS")[:100])
    result = run_machine_job(job(), FLEET, checkout)
    assert result.exit_code == 1
    assert "has no verdict that can be read" in result.sessions[1].failure
    summary = summarize_job(result, SHA)
    assert "`made-by-expectations`: `" in summary
    assert summary.count("PASS: ") == 1  # of the other session


def test_verdicts_of_an_earlier_run_do_not_count(checkout: Checkout) -> None:
    assert run_machine_job(job(), FLEET, checkout).exit_code == 0
    (checkout.root / "expectations.left").unlink()
    result = run_machine_job(job(), FLEET, checkout)
    assert result.exit_code == 1
    assert result.sessions[1].failure == "it did nothing: no result was left"


def test_a_job_without_sessions_fails(checkout: Checkout) -> None:
    empty = job().model_copy(update={"calls": ()})
    assert run_machine_job(empty, FLEET, checkout).exit_code == 1


@pytest.mark.parametrize(
    ("cards", "listed", "expected"),
    [
        (4, "0, 4, 0\n1, 4, 0\n", "lists 2 fit cards; 4 were promised; it prints 0, 4, 0 1, 4, 0"),
        (1, None, "exits with 9: no driver"),
    ],
)
def test_a_sick_machine_runs_nothing(
    checkout: Checkout, cards: int, listed: str | None, expected: str
) -> None:
    (checkout.root / "cards").unlink()
    if listed is not None:
        (checkout.root / "cards").write_text(listed)
    result = run_machine_job(job(cards), FLEET, checkout)
    assert (result.exit_code, result.sick_before, result.sessions) == (
        SICK, f"nvidia-smi {expected}", (),
    )  # fmt: skip
    assert asked(checkout) == []
    assert expected in summarize_job(result, SHA)


def test_a_machine_that_is_sick_after_the_job_is_at_fault(checkout: Checkout) -> None:
    (checkout.root / "nox.py").write_text(
        NOX.replace("code =", "Path('cards').unlink(missing_ok=True)\ncode =")
    )
    result = run_machine_job(job(), FLEET, checkout)
    assert (result.exit_code, result.sick_after) == (SICK, "nvidia-smi exits with 9: no driver")
    assert "sick after the job" in summarize_job(result, SHA)


def test_an_unknown_machine_is_an_error(checkout: Checkout) -> None:
    with pytest.raises(UsageError, match="has no machine 'tpu'"):
        run_machine_job(job().model_copy(update={"target": "tpu"}), FLEET, checkout)
