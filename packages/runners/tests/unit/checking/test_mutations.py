"""One edit of the committed workflows at a time: each is found, and nothing is found without one."""

import shutil
import tomllib
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay_runners.checking import RULES, check_workflows
from assay_runners.checking.sessions import read_sessions
from assay_runners.fleet.reading import read_fleet

ROOT = Path(__file__).resolve().parents[5]
MUTATIONS = tomllib.loads((Path(__file__).parent / "mutations.toml").read_text(encoding="utf-8"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The repository, as far as rules read it."""
    for name in (".github", "runners"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "noxfile.py", tmp_path)
    return tmp_path


def findings(root: Path) -> list[str]:
    return [str(found) for found in check_workflows(root, read_fleet(root), read_sessions(root))]


def test_the_committed_workflows_keep_the_rules(root: Path) -> None:
    assert findings(root) == []


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_found(root: Path, name: str) -> None:
    edit = MUTATIONS[name]
    path = (root / ".github/workflows" / edit["file"]).resolve()
    text = path.read_text(encoding="utf-8")
    assert edit["old"] in text, "the workflow is written differently now: the mutation is none"
    path.write_text(text.replace(edit["old"], edit["new"]), encoding="utf-8")
    found = check_workflows(root, read_fleet(root), read_sessions(root))
    assert edit["rule"] in {one.rule for one in found}, found
    # The line is one of the file, and near the edit where the file itself is what is wrong.
    assert all(
        1 <= one.line <= len(path.read_text().splitlines())
        for one in found
        if path.name in one.file
    )


def test_every_rule_says_what_it_is_for_and_is_seen_failing() -> None:
    assert all((rule.__doc__ or "").strip() for rule in RULES)
    seen = {edit["rule"] for edit in MUTATIONS.values()}
    assert len(seen) >= len(RULES), "a rule without a mutation"


def test_no_workflow_is_no_pass(root: Path) -> None:
    shutil.rmtree(root / ".github/workflows")
    with pytest.raises(UsageError, match="has no workflow"):
        findings(root)


@pytest.mark.parametrize("text", ["on: push\njobs: {a: [}", "- a\n- b\n", ""])
def test_a_file_that_is_no_workflow_is_no_pass(root: Path, text: str) -> None:
    (root / ".github/workflows/new.yml").write_text(text)
    with pytest.raises(UsageError, match=r"new\.yml is no "):
        findings(root)


def test_a_workflow_without_jobs_is_found(root: Path) -> None:
    (root / ".github/workflows/new.yml").write_text(
        "name: x\non: push\npermissions: {}\njobs: {}\n"
    )
    assert any("new.yml:1: empty: " in one for one in findings(root))


def test_an_entry_with_an_unknown_session_is_found(root: Path) -> None:
    file = root / "runners/runners.toml"
    file.write_text(file.read_text().replace('"expectations"', '"expectation"', 1))
    assert "runners/runners.toml:1: session: nox has no session 'expectation'" in findings(root)


def test_sessions_are_those_of_the_noxfile() -> None:
    assert {"lint", "false-alarms", "machine-job", "report-nightly"} <= read_sessions(ROOT)
