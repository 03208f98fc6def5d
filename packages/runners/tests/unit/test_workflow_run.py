"""Events, plans and outputs of workflow runs."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from assay.errors import UsageError
from assay_runners.commands import app
from assay_runners.planning import Event
from assay_runners.workflow_run import (
    add_to_summary,
    files_changed_since,
    read_event,
)
from packages.runners.tests.event_payloads import (
    DOCUMENTS,
    SHELL,
    dispatch,
    labeled,
    pull_request,
    push,
    recorded,
    schedule,
)
from packages.runners.tests.fake_programs import Programs
from packages.runners.tests.fleet import GITHUB, write_fleet

WRONG: list[dict[str, Any]] = [
    {"pull_request": "text"},
    {"pull_request": {"user": "text"}},
    {"pull_request": {"head": None}},
    {"pull_request": {"base": {"repo": [1]}}},
    {"pull_request": {"labels": [{"color": "ededed"}]}},
    {"sender": "text"},
    {"label": ["smoke:nvidia"]},
    {"inputs": [1]},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_payload_of_another_shape_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = tmp_path / "event.json"
    payload = pull_request("labeled", label="smoke:nvidia").payload | wrong
    path.write_text(json.dumps(payload))
    whole = tmp_path / "recorded_event.json"
    whole.write_text(json.dumps({"event_name": "pull_request", "event": payload}))
    variables = {"GITHUB_EVENT_PATH": str(path), "GITHUB_EVENT_NAME": "pull_request"}
    for file, environment in ((str(whole), {}), ("", variables)):
        with pytest.raises(UsageError, match=r"event\.json: ") as raised:
            read_event(file, environment)
        assert "\n" not in str(raised.value)


def test_nothing_is_written_outside_a_workflow_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    add_to_summary("text", {})
    assert list(tmp_path.iterdir()) == []


UNNAMED = {**labeled("x").payload, "label": {}}


def bare(name: str, payload: object = None) -> str:
    return json.dumps({"event_name": name, "event": payload or {}})


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Enter a checkout, and set the files for the outputs and the summary of a step."""
    root = tmp_path / "repository"
    write_fleet(root)
    for words in (
        ("init", "-q", "-b", "main"), ("add", "."), ("commit", "-qm", "first"),
        ("update-ref", "refs/remotes/origin/main", "HEAD"),
    ):  # fmt: skip
        git(root, *words)
    monkeypatch.chdir(root)
    files = tmp_path / "output", tmp_path / "summary"
    for name, file in zip(("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY"), files, strict=True):
        monkeypatch.setenv(name, str(file))
    return files


def plan(tmp_path: Path, event: object, *words: str) -> tuple[int, str, str]:
    file = tmp_path / "event.json"
    file.write_text(json.dumps(event))
    done = CliRunner().invoke(app, ["plan", str(file), *words])
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def run_of(
    tmp_path: Path, outputs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Run `plan` inside the workflow run of an event. Returns: the printed plan."""

    def plan_in_run(event: Event, *words: str) -> dict[str, Any]:
        assert outputs
        (tmp_path / "payload.json").write_text(json.dumps(event.payload))
        monkeypatch.setenv("GITHUB_EVENT_PATH", str(tmp_path / "payload.json"))
        for name, value in (("EVENT_NAME", event.name), ("SHA", event.sha), ("REF", event.ref)):
            monkeypatch.setenv(f"GITHUB_{name}", value)
        done = CliRunner().invoke(app, ["plan", *words])
        assert done.exit_code == 0, done.stderr
        made: dict[str, Any] = json.loads(done.stdout)
        return made

    return plan_in_run


def test_a_workflow_run_plans_its_own_event(run_of: Callable[..., dict[str, Any]]) -> None:
    made = run_of(push("refs/heads/main"))
    assert made["sha"] == push("refs/heads/main").sha
    assert len(made["tiers"]) == 14


def test_changes_are_counted_since_the_branch_left_main(
    tmp_path: Path, run_of: Callable[..., dict[str, Any]]
) -> None:
    root = tmp_path / "repository"
    (root / "README.md").write_text("read")
    git(root, "add", ".")
    git(root, "commit", "-qm", "documents")
    assert "only documentation changed" in run_of(pull_request("opened"))["nothing"]
    (root / "code.py").touch()
    git(root, "add", ".")
    git(root, "commit", "-qm", "code")
    assert len(run_of(pull_request("opened"))["tiers"]) == 14


NIGHT = GITHUB.nightly


@pytest.mark.parametrize(
    ("answer", "num_sessions"),
    [
        ([{"headSha": schedule(NIGHT).sha}], 0),
        ([{"headSha": "e" * 40}], 8),
        ([], 8),
        (None, 8),  # GitHub refuses
    ],
)
def test_an_unchanged_night_runs_nothing_and_an_unknown_one_everything(
    programs: Programs,
    run_of: Callable[..., dict[str, Any]],
    answer: list[dict[str, str]] | None,
    num_sessions: int,
) -> None:
    if answer is None:
        programs.refuse()
    else:
        programs.answers(answer)
    made = run_of(schedule(NIGHT), "--unless-succeeded", "nightly.yml")
    assert len(made["tiers"]) == num_sessions
    (words,) = programs.heard
    assert words[:6] == ["run", "list", "--workflow", "nightly.yml", "--branch", "main"]
    assert words[6:8] == ["--status", "success"]


def test_an_explanation_lists_sessions_with_their_pythons(
    tmp_path: Path, outputs: tuple[Path, Path]
) -> None:
    _, stdout, _ = plan(tmp_path, recorded(schedule(NIGHT)), "--explain")
    actual = [line.strip() for line in stdout.splitlines() if "Python" in line]
    most = "faults, false-alarms, fuzz, perf, bench-rates, smoke-faults, suites"
    assert actual == [
        f"without an accelerator, Python {GITHUB.pythons[0]}: {most}",
        f"without an accelerator, Python {GITHUB.bench_python}: bench",
    ]


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


def test_outputs_are_lists_on_one_line(tmp_path: Path, outputs: tuple[Path, Path]) -> None:
    code, stdout, _ = plan(tmp_path, recorded(labeled("smoke:nvidia-4")))
    assert code == 0
    lines = dict(line.split("=", 1) for line in outputs[0].read_text().splitlines())
    assert [job["session"] for job in json.loads(lines["tiers"])] == ["lint", "types", "unit"]
    (machine,) = json.loads(lines["machines"])
    assert machine == json.loads(stdout)["machines"][0]
    assert [call["session"] for call in machine["calls"]] == ["check", "smoke", "expectations"]
    assert machine["calls"][1] == {
        "session": "smoke", "arguments": ["--budget", "40m", "--cards", "4"],
    }  # fmt: skip
    assert "assay-nvidia-4" in outputs[1].read_text()


def test_nothing_to_do_is_an_empty_list_with_a_reason(
    tmp_path: Path, outputs: tuple[Path, Path]
) -> None:
    code, _, _ = plan(tmp_path, recorded(pull_request("opened", changed=DOCUMENTS)))
    assert code == 0
    assert outputs[0].read_text() == "tiers=[]\nmachines=[]\n"
    assert outputs[1].read_text().startswith("### Nothing to do\n")


def test_a_refusal_fails_and_names_the_nearest_label(
    tmp_path: Path, outputs: tuple[Path, Path]
) -> None:
    code, _, stderr = plan(tmp_path, recorded(labeled("smoke:nvidai")))
    expected = "smoke:nvidai: there is no machine 'nvidai'; nearest is smoke:nvidia\n"
    assert (code, stderr) == (2, f"assay: {expected}")
    assert plan(tmp_path, recorded(labeled("smoke:nvidai")), "--explain") == (
        2, f"pull_request, commit {'c' * 40}\n  refused: {expected}", "",
    )  # fmt: skip
    assert outputs[1].read_text().startswith("### Refused\n")


def test_foreign_text_stays_inside_the_code_block(
    tmp_path: Path, outputs: tuple[Path, Path]
) -> None:
    label = f"smoke:{SHELL}```\n# not a heading"
    code, _, _ = plan(tmp_path, recorded(labeled(label)))
    assert code == 2
    summary = outputs[1].read_text()
    assert summary.count("````") == 2  # longer than any run of backticks inside
    assert outputs[0].read_text() == "tiers=[]\nmachines=[]\n"


def test_a_model_full_of_shell_is_one_argument(tmp_path: Path, outputs: tuple[Path, Path]) -> None:
    event = recorded(dispatch("bench.yml", vendor="cpu", model=SHELL, baseline="b.json"))
    code, stdout, _ = plan(tmp_path, event)
    assert code == 0
    run, compare = json.loads(stdout)["machines"][0]["calls"]
    assert run["arguments"] == ["run", "--model", SHELL, "--output", "runs/bench"]
    assert compare["arguments"] == ["compare", "b.json", "runs/bench", "--output", "runs/compared"]
    assert outputs[0].read_text().count("\n") == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"action": "opened"}', "a recorded event has `event_name`, and its payload"),
        ('{"event_name": "push", "event": 3}', "and its payload in `event`"),
        (
            '{"event_name": "push", "event": {}, "changed": "a"}',
            "`changed` is not a list of files",
        ),
        (bare("pull_requests"), "no event 'pull_requests'; nearest is pull_request"),
        (bare("pull_request"), "a payload of pull_request has action, and this"),
        (bare("push"), "a payload of push has ref, and this one does not"),
        (bare("pull_request", UNNAMED), "has label.name, and this one"),
    ],
)
def test_a_file_that_is_not_an_event_is_refused(
    tmp_path: Path, outputs: tuple[Path, Path], text: str, message: str
) -> None:
    file = tmp_path / "event.json"
    file.write_text(text)
    done = CliRunner().invoke(app, ["plan", str(file)])
    assert done.exit_code != 0
    assert message in str(done.exception)


@pytest.mark.parametrize(
    ("label", "code", "line"),
    [
        ("smoke:nvidia-4", 0, "  smoke on assay-nvidia-4, asked for by the label smoke:nvidia-4"),
        ("smoke-nvidia", 2, "  refused: smoke-nvidia: "),
        ("hw:amd", 0, "  the label 'hw:amd' asks for no machine"),
    ],
)
def test_a_label_is_tried_without_an_event(
    outputs: tuple[Path, Path], label: str, code: int, line: str
) -> None:
    assert outputs
    done = CliRunner().invoke(app, ["plan", label, "--explain"])
    assert (done.exit_code, done.stderr) == (code, "")
    assert f"\n{line}" in done.stdout


def test_changed_files_are_those_since_the_branch_started(
    tmp_path: Path, outputs: tuple[Path, Path]
) -> None:
    root = tmp_path / "repository"
    git(root, "checkout", "-q", "-b", "topic")
    (root / "ü b.md").write_text("text")
    git(root, "add", ".")
    git(root, "commit", "-qm", "topic")
    git(root, "checkout", "-q", "main")
    (root / "a.py").write_text("2")
    git(root, "add", ".")
    git(root, "commit", "-qm", "second")
    git(root, "checkout", "-q", "topic")
    assert files_changed_since("main", root) == ("ü b.md",)
    # An unknown commit does not count as "nothing changed".
    for unknown in ("0" * 40, "--output=/tmp/x"):
        assert files_changed_since(unknown, root) is None
