"""Evaluates workflows that stand in a test, where node and GitHub's packages are installed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from assay_runners.evaluating.installing import FOLDER, is_installed
from assay_runners.evaluating.workflows import EvaluatedCase, EventCase, evaluate

ROOT = Path(__file__).parents[5]
SHA = "1" * 40
HEAD = "2" * 40
GITHUB = {"sha": SHA, "ref": "refs/heads/main", "repository": "our/repo", "run_id": "77"}

Evaluate = Callable[..., EvaluatedCase]


@pytest.fixture(scope="session")
def installed() -> Path:
    """The folder of the packages. ASSAY_EVALUATING names another one than nox makes."""
    folder = Path(os.environ.get("ASSAY_EVALUATING") or ROOT / FOLDER)
    missing = []
    if shutil.which("node") is None:
        missing.append("node is not on the path")
    if not is_installed(folder):
        missing.append(f"{folder} lacks GitHub's packages for these sources")
    if missing:
        reason = f"{' and '.join(missing)}: nox -s runners brings both"
        if os.environ.get("ASSAY_REQUIRE_NODE") == "1":
            pytest.fail(f"ASSAY_REQUIRE_NODE is 1, and {reason}")
        pytest.skip(reason)
    return folder


@pytest.fixture
def write_workflows(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """Writes workflows, by file name without its suffix, into a new repository."""

    def write(workflows: dict[str, str]) -> Path:
        folder = tmp_path / ".github" / "workflows"
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in workflows.items():
            (folder / f"{name}.yml").write_text(dedent(text), encoding="utf-8")
        return tmp_path

    return write


@pytest.fixture
def evaluate_event(installed: Path, write_workflows: Callable[[dict[str, str]], Path]) -> Evaluate:
    """What `workflows` make of one event: the case is made of the keywords."""

    def run(
        workflows: dict[str, str],
        event_name: str,
        event: dict[str, Any] | None = None,
        *,
        reusable: dict[str, str] | None = None,
        **others: Any,
    ) -> EvaluatedCase:
        github = {**GITHUB, **others.pop("github", {})}
        case = EventCase(
            name="the case", event_name=event_name, event=event or {}, github=github, **others
        )
        texts = {uses: dedent(text) for uses, text in (reusable or {}).items()}
        root = write_workflows(workflows)
        (only,) = evaluate(root, [case], reusable=texts, folder=installed)
        return only

    return run


@pytest.fixture
def pull_request() -> dict[str, Any]:
    """A pull request of the repository itself, to main."""
    return {
        "number": 5,
        "head": {"ref": "topic", "sha": HEAD, "repo": {"full_name": "our/repo"}},
        "base": {"ref": "main", "sha": "3" * 40, "repo": {"full_name": "our/repo"}},
    }
