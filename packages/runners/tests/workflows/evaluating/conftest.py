"""Fixtures that evaluate the workflows of a test."""

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from packages.runners.tests.github_parser.workflows import EvaluatedCase, EventCase, evaluate

SHA = "1" * 40
HEAD = "2" * 40
GITHUB = {"sha": SHA, "ref": "refs/heads/main", "repository": "our/repo", "run_id": "77"}

Evaluate = Callable[..., EvaluatedCase]


@pytest.fixture
def write_workflows(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """Write workflows, by file name without suffix, into a new repository."""

    def write(workflows: dict[str, str]) -> Path:
        folder = tmp_path / ".github" / "workflows"
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in workflows.items():
            (folder / f"{name}.yml").write_text(dedent(text), encoding="utf-8")
        return tmp_path

    return write


@pytest.fixture
def evaluate_event(parser: Path, write_workflows: Callable[[dict[str, str]], Path]) -> Evaluate:
    """Evaluate `workflows` for one event. The keywords make the case."""

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
        (only,) = evaluate(root, [case], reusable=texts, folder=parser.parent)
        return only

    return run


@pytest.fixture
def pull_request() -> dict[str, Any]:
    """Make a pull request from the repository itself to main."""
    return {
        "number": 5,
        "head": {"ref": "topic", "sha": HEAD, "repo": {"full_name": "our/repo"}},
        "base": {"ref": "main", "sha": "3" * 40, "repo": {"full_name": "our/repo"}},
    }
