"""Jobs of a plan, on a machine and in a rehearsal, with a fake nox."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

from assay.errors import UsageError
from assay.runs import open_progress
from assay_runners.planning import Event, MachineJob, SessionCall
from assay_runners.running import (
    SICK,
    Checkout,
    Rehearsal,
    rehearse,
    run_machine_job,
    summarize_job,
)
from packages.runners.tests.event_payloads import DOCUMENTS, dispatch, labeled, pull_request
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


SESSIONS = ("check", "smoke", "expectations")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    write_fleet(root)
    (root / ".gitignore").write_text("runs/\n*.jsonl\n")
    (root / "README.md").write_text("read\n")
    (root / "nox.py").write_text(NOX.replace("made-by-{name}", "made-by-{name}/clean"))
    for session in SESSIONS:
        (root / f"{session}.left").write_text(verdict("PASS"))
    git(root, "init", "-q", "-b", "main")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    return root


def git(root: Path, *words: str) -> None:
    who = ("-c", "user.name=x", "-c", "user.email=x@localhost")
    subprocess.run(["git", "-C", str(root), *who, *words], check=True, capture_output=True)


def patch_of(root: Path, **files: str) -> Path:
    """Make a patch that writes these files, without changing the repository."""
    for name, text in files.items():
        (root / name).write_text(text)
    git(root, "add", "--intent-to-add", ".")
    done = subprocess.run(["git", "-C", str(root), "diff"], check=True, capture_output=True)
    patch = root.parent / "change.diff"
    patch.write_bytes(done.stdout)
    git(root, "reset", "-q", "--hard")
    return patch


def rehearsed(
    root: Path, event: Event, patch: Path | None = None, only: tuple[str, ...] = ()
) -> Rehearsal:
    folder = root.parent / "rehearsal"
    folder.mkdir()
    with open_progress() as progress:
        nox = (sys.executable, "nox.py")
        return rehearse(event, patch, frozenset(only), root, folder, nox, progress)


def asked_of_nox(root: Path) -> list[str]:
    file = root.parent / "rehearsal/clone/asked.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return [line.split('"-s", "')[1].split('"')[0] for line in lines]


def test_a_label_runs_the_same_sessions_as_on_github(repository: Path) -> None:
    found = rehearsed(repository, labeled("smoke:nvidia"))
    assert found.exit_code == 0
    assert asked_of_nox(repository) == ["lint", "types", "unit", "check", "smoke", "expectations"]
    assert "# smoke on assay-nvidia: passes" in found.summary
    assert not (repository / "asked.jsonl").exists(), "the checkout itself is left alone"


def test_the_page_has_every_job_with_its_needs_sessions_and_reports(repository: Path) -> None:
    patch = patch_of(repository, **{"smoke.left": verdict("FAIL")})
    (repository / "nox.py").write_text(
        NOX.replace("made-by-{name}", "made by {name}/clean").replace(
            '(folder / "verdict', '(folder / "report.html").touch(); (folder / "verdict', 1
        )
    )
    git(repository, "commit", "-qam", "sessions write pages")
    assert rehearsed(repository, labeled("smoke:nvidia"), patch).exit_code == 1
    folder = repository.parent / "rehearsal"
    page = (folder / "index.html").read_text()
    jobs = re.findall(r"<h2><span.*>. (.*)</span> (.*)</h2>\n(?:<p.*>(.*)</p>)?", page)
    needs = "needs lint, types, unit"
    tiers = [("PASS", name, "") for name in ("lint", "types", "unit")]
    assert jobs == [*tiers, ("FAIL", "smoke of assay-nvidia on the CPU", needs)]
    assert re.findall(r"</span> (.+)</td>", page) == ["made by smoke/clean says FAIL"]
    links = [unquote(link) for link in re.findall(r'<a href="(.*?)">', page)]
    assert len(links) == 3
    assert all((folder / link).is_file() for link in links)
    assert "model.layers.1.mlp.down_proj" in page


def test_a_broken_model_fails_and_its_module_is_named(repository: Path) -> None:
    patch = patch_of(repository, **{"check.left": verdict("FAIL"), "check.code": "1"})
    found = rehearsed(repository, labeled("smoke:nvidia"), patch)
    assert found.exit_code == 1
    assert "model.layers.1.mlp.down_proj" in found.summary
    assert "The CPU replaces every accelerator." in found.summary
    # Only the clone has the patched commit.
    clone = repository.parent / "rehearsal/clone"
    assert f"```bash\ncd {clone}\nnox -s check\n" in found.summary


def test_a_change_of_documentation_has_nothing_to_do(repository: Path) -> None:
    patch = patch_of(repository, **{"README.md": "read this\n"})
    found = rehearsed(repository, pull_request("opened"), patch)
    assert found.exit_code == 0
    assert found.summary.startswith("### Nothing to do\n")
    assert asked_of_nox(repository) == []


def test_a_pull_request_runs_all_tiers_then_trains(repository: Path) -> None:
    found = rehearsed(repository, pull_request("opened"))
    assert found.exit_code == 0
    tiers = ["lint", "types", "unit", "subsystem", "subsystem-long", "runners", "repo"]
    assert asked_of_nox(repository) == [*tiers, "smoke", "expectations", "check"]


def test_a_training_without_results_fails(repository: Path) -> None:
    (repository / "smoke.left").unlink()
    git(repository, "commit", "-qam", "smoke leaves nothing")
    found = rehearsed(repository, pull_request("opened"))
    assert found.exit_code == 1
    assert "| `smoke` | FAILS, it did nothing: no result was left: `nox -s smoke" in found.summary


def test_machines_do_not_start_after_a_failed_session(repository: Path) -> None:
    patch = patch_of(repository, **{"unit.code": "1"})
    found = rehearsed(repository, labeled("smoke:nvidia"), patch)
    assert found.exit_code == 1
    assert asked_of_nox(repository) == ["lint", "types", "unit"]
    assert "`nox -s unit` repeats it" in found.summary
    page = (repository.parent / "rehearsal/index.html").read_text()
    assert "not run</span> smoke of assay-nvidia on the CPU</h2>" in page
    assert "The jobs on machines would not start" in found.summary


def test_a_refusal_exits_with_2(repository: Path) -> None:
    found = rehearsed(repository, labeled("smoke:nvidai"))
    assert (found.exit_code, asked_of_nox(repository)) == (2, [])
    assert "nearest is smoke:nvidia" in found.summary


def test_only_refuses_a_session_that_is_not_planned(repository: Path) -> None:
    with pytest.raises(
        UsageError, match="--only expectation: the event starts check, expectations"
    ):
        rehearsed(repository, labeled("smoke:nvidia"), only=("expectation",))


def test_only_leaves_out_the_other_sessions(repository: Path) -> None:
    found = rehearsed(repository, labeled("smoke:nvidia"), only=("check", "expectations"))
    page = (repository.parent / "rehearsal/index.html").read_text()
    for text in (found.summary, page):
        assert "Left out by --only: lint, types, unit, smoke." in text
    assert asked_of_nox(repository) == ["check", "expectations"]


def test_a_recapture_without_captures_fails(repository: Path) -> None:
    event = dispatch("recapture.yml", models="micro:llama", vendors="cpu", reason="torch 2.13")
    found = rehearsed(repository, event)
    assert found.exit_code == 1
    assert "it did nothing: no result was left" in found.summary


def test_a_patch_that_does_not_apply_is_an_error(repository: Path) -> None:
    patch = patch_of(repository, **{"README.md": "read this\n"})
    (repository / "README.md").write_text("something else\n")
    git(repository, "commit", "-qam", "second")
    with pytest.raises(UsageError, match=r"git apply failed: .*README"):
        rehearsed(repository, pull_request("opened"), patch)


def test_without_a_patch_the_changed_files_of_the_event_count(repository: Path) -> None:
    found = rehearsed(repository, pull_request("opened", changed=DOCUMENTS))
    assert asked_of_nox(repository) == []
    assert found.exit_code == 0
