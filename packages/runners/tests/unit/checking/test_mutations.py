"""Single edits of the committed workflows: the rules find each, and nothing without an edit."""

import re
import shutil
import tomllib
from copy import deepcopy
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay_runners.checking import rules
from assay_runners.checking.rules import RULES, check_workflows
from assay_runners.checking.workflow_documents import read_documents
from assay_runners.fleet import read_fleet
from packages.runners.tests.fleet import GITHUB, ROOT

FILES = tomllib.loads((Path(__file__).parent / "mutations.toml").read_text(encoding="utf-8"))
MUTATIONS = {
    (file, name): (old, rule, new)
    for file, texts in FILES.items()
    for old, edits in texts.items()
    for name, (rule, new) in edits.items()
}
NUM_MUTATIONS = sum(len(edits) for texts in FILES.values() for edits in texts.values())

NEW = """
name: Slow suites
on:
  push:
    branches: [<protected_ref>]
permissions: {}
jobs:
  suites:
    name: suites for ${{ github.sha }}
    runs-on: <hosted>
    timeout-minutes: 90
    permissions:
      contents: read
    concurrency:
      group: suites-${{ github.sha }}
      cancel-in-progress: false
    steps:
      - name: Check out the commit
        uses: actions/checkout@0123456789abcdef0123456789abcdef01234567 # v8.0.0
        with:
          ref: ${{ github.sha }}
          persist-credentials: false
      - name: Set up Python and nox
        uses: <own>.github/actions/setup
        with:
          python: "3.11"
      - name: Run the suites
        run: nox -s suites
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Copy the files that the rules read."""
    for name in (".github", "runners"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "noxfile.py", tmp_path)
    return tmp_path


def fill(text: str) -> str:
    """Replace the names of settings by their values in the repository under test."""
    other = {"$/": "./", "./": "$/"}[GITHUB.own]
    values = {**GITHUB.model_dump(), "own": GITHUB.own, "other": other}
    values |= {"organization": GITHUB.organization, "vocabulary": rules._FILE}
    return re.sub(r"<(\w+)>", lambda name: values[name[1]], text)


def findings(root: Path) -> list[str]:
    return [str(found) for found in check_workflows(root, read_fleet(root))]


def test_the_committed_workflows_keep_the_rules(root: Path) -> None:
    assert findings(root) == []


@pytest.mark.parametrize(("file", "name"), MUTATIONS)
def test_a_mutation_is_found(root: Path, file: str, name: str) -> None:
    old, rule, new = MUTATIONS[file, name]
    path = (root / ".github/workflows" / file).resolve()
    text = path.read_text(encoding="utf-8")
    old = fill(old)
    if old.endswith("..."):
        old = text[text.index(old.removesuffix("...")) :]
    assert old in text, "the workflow has changed: update the mutation"
    path.write_text(text.replace(old, fill(new)), encoding="utf-8")
    if not path.read_text():
        path.unlink()
    found = check_workflows(root, read_fleet(root))
    assert rule in {one.rule for one in found}, found
    lines = path.read_text().splitlines() if path.exists() else [""]
    assert all(1 <= one.line <= len(lines) for one in found if path.name in one.file)


def test_every_rule_has_a_docstring_and_a_mutation() -> None:
    assert all((rule.find.__doc__ or "").strip() for rule in RULES.values())
    assert set(RULES) <= {rule for _, rule, _ in MUTATIONS.values()}
    assert len(MUTATIONS) == NUM_MUTATIONS  # a second edit of a file has another name


def test_a_repository_without_workflows_is_an_error(root: Path) -> None:
    shutil.rmtree(root / ".github/workflows")
    with pytest.raises(UsageError, match="has no workflow"):
        findings(root)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"on: push\njobs: {a: [}", "is not YAML"),
        (b"- a\n- b\n", "is not a workflow"),
        (b"", "is not a workflow"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"a: " + b"[" * 3000, "is not YAML"),
    ],
)
def test_a_file_that_is_not_a_workflow_is_an_error(
    root: Path, content: bytes, message: str
) -> None:
    (root / ".github/workflows/new.yml").write_bytes(content)
    with pytest.raises(UsageError, match=rf"new\.yml:? {message}"):
        findings(root)


def test_a_folder_instead_of_a_workflow_is_an_error(root: Path) -> None:
    (root / ".github/workflows/new.yml").mkdir()
    with pytest.raises(UsageError, match=r"new\.yml: it is a folder, not a file"):
        findings(root)


@pytest.mark.parametrize(
    "line",
    [
        "with:", "with: x", "needs: 5", "needs: [[a]]", "permissions: [contents]", "env: x",
        "steps: x", "steps: [a, [b], {run: 5}, {uses: [a], with: x}]", "concurrency: 5",
        "timeout-minutes: [5]", "uses: [a]", "environment: [a]", "runs-on:",
    ],
)  # fmt: skip
@pytest.mark.parametrize("events", ["{pull_request: {types: [labeled]}}", "workflow_dispatch"])
def test_a_job_with_a_value_of_another_type_is_found(root: Path, line: str, events: str) -> None:
    text = f"name: x\non: {events}\npermissions: {{}}\njobs:\n  a:\n    {line}\n"
    (root / ".github/workflows/new.yml").write_text(text)
    assert any("new.yml:" in one for one in findings(root))


@pytest.mark.parametrize("events", ["{schedule: x}", "{schedule: [x]}", "{push: 5}", "5", "[[a]]"])
def test_events_of_another_type_are_found(root: Path, events: str) -> None:
    (root / ".github/workflows/new.yml").write_text(
        f"name: x\non: {events}\npermissions: {{}}\njobs: {{}}\n"
    )
    assert any("new.yml:" in one for one in findings(root))


def test_a_deleted_job_or_workflow_is_found(root: Path) -> None:
    jobs = [(one.file, job.line) for one in read_documents(root) for job in one.jobs.values()]
    assert len(jobs) > len({file for file, _ in jobs}) > 10
    for file, line in jobs:
        text = (root / file).read_text()
        ends = [end for name, end in jobs if name == file and end > line]
        lines = text.splitlines(keepends=True)
        (root / file).write_text(
            "".join(lines[: line - 1] + lines[min(ends, default=len(lines) + 1) - 1 :])
        )
        assert any(one.startswith(f"{file}:") for one in findings(root)), (file, line)
        (root / file).unlink()
        assert f"{file}:1: complete: the file is missing" in findings(root)
        (root / file).write_text(text)


def test_a_new_workflow_passes_once_the_advice_of_each_finding_is_followed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ".github/workflows/new.yml"
    (root / file).write_text(fill(NEW))
    vocabulary = deepcopy(rules._read_vocabulary())
    monkeypatch.setattr(rules, "_read_vocabulary", lambda: vocabulary)
    advice = [one.partition(f'under ["{file}"]: ')[2] for one in findings(root)]
    assert advice == [
        '"on.push.branches[]" = ["main"]',
        '"jobs.suites.steps[].run" = ["nox -s suites"]',
    ]
    vocabulary[file] = tomllib.loads("\n".join(advice))
    assert findings(root) == []


UPLOAD = "actions/upload-artifact@" + "0" * 40
# Edits of a workflow that break a rule, of which a simpler reason would be false.
REASONS = (
    ("smoke", "[labeled]", "[labeled, unlabeled]", "unlabeled: no label is given then, and smoke.yml depends on labels"),
    (
        "smoke", "[labeled]", "[synchronize, opened]",
        "opened, synchronize: no label is given then, and smoke.yml depends on labels",
    ),
    (
        "labels", "    steps:\n", f"    steps:\n      - uses: {UPLOAD} # v7.0.1\n",
        f"pull_request_target starts this: only commands may run, not {UPLOAD}",
    ),
    (
        "tiers", "      group: tiers-", "      group: ${{ github.run_id }} # ",
        "name the commit in the group of session, to keep the jobs of labels apart",
    ),
    (
        "tiers", "\non:\n", "\non:\n  workflow_dispatch:\n    inputs: {sha: {type: string}}\n",
        "workflow_dispatch would start it without the inputs of a caller",
    ),
    (
        "bench", "uses: <repository>/.github/workflows/accelerator.yml@<protected_ref>",
        "uses: other/checks/.github/workflows/accelerator.yml@v1",
        ("other/checks/.github/workflows/accelerator.yml@v1 is not <repository>/.github/workflows/accelerator.yml"
        "@<protected_ref>, the file for jobs on machines"),
    ),
    ("plan", " # v7.0.1", " # v7", "after it: # v1.2.3"),
    ("ci", "timeout-minutes: 45", "timeout-minutes: 600", "600 is not 'minutes', as"),
    (
        "ci", "    timeout-minutes: 45", "    environment: release\n    timeout-minutes: 45",
        ('the file may not have this key. If you need it, add to <vocabulary>, under [".github/workflows/ci.yml"]:'
        ' "jobs.smoke.environment" = ["release"]'),
    ),
    (
        "ci", "run: nox -s check\n", "run: nox -s chekc\n",
        ("'nox -s chekc' is not listed. If you need it, add it to \"jobs.smoke.steps[].run\" under"
        ' [".github/workflows/ci.yml"] in <vocabulary>'),
    ),
    ("ci", "needs: [plan, tests, smoke]", "needs: [plan, tests]", "jobs.required.needs[] lacks 'smoke'. If it may go,"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "old", "new", "reason"), REASONS)
def test_a_reason_is_true(root: Path, name: str, old: str, new: str, reason: str) -> None:
    file = root / f".github/workflows/{name}.yml"
    text = file.read_text()
    assert fill(old) in text
    file.write_text(text.replace(fill(old), fill(new), 1))
    assert fill(reason) in "\n".join(findings(root))


def test_a_workflow_without_jobs_or_events_is_found(root: Path) -> None:
    (root / ".github/workflows/new.yml").write_text("name: x\npermissions: {}\n")
    found = [one.partition(" required: ")[2] for one in findings(root)]
    assert found == ["jobs is missing", "on is missing"]
