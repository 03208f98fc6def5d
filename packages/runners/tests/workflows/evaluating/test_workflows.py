"""Errors in the workflows, the cases, node and its packages."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from assay.errors import MachineError, UsageError
from packages.runners.tests.github_parser import workflows as workflows_module
from packages.runners.tests.github_parser.installing import (
    BUNDLE,
    SOURCES,
    STAMP,
    hash_sources,
    install,
)
from packages.runners.tests.github_parser.workflows import EventCase, evaluate

Write = Callable[[dict[str, str]], Path]

GITHUB = {"sha": "1" * 40, "ref": "refs/heads/main", "repository": "our/repo", "run_id": "77"}
PUSH = EventCase(name="push", event_name="push", event={"ref": "refs/heads/main"}, github=GITHUB)
GOOD = "on: push\njobs: {run: {runs-on: x, steps: [{run: id}]}}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("on: push\njobs: {run: {runs-on: x, stepz: []}}", "Unexpected value 'stepz'"),
        ("on: push\njobs: {run: {steps: [{run: id}]}}", "Required property is missing: runs-on"),
        ("on: pusch\njobs: {run: {runs-on: x}}", "Unexpected value 'pusch'"),
        ("on: push\njobs: {run: {runs-on: x, if: 'matrix.a == 1'}}", "named-value: 'matrix'"),
        ("on: push\njobs: {run: {runs-on: '${{ github.'}}", "The expression is not closed"),
        ("on: push\njobs: {a: {needs: b, runs-on: x}, c: {runs-on: x}}", "unknown job 'b'"),
        ("on: push\njobs: [", "bad.yml"),
        ("", "bad.yml"),
    ],
)
def test_a_refusal_of_the_parser_is_an_error(
    parser: Path, write_workflows: Write, text: str, message: str
) -> None:
    root = write_workflows({"good": GOOD, "bad": text})
    with pytest.raises(UsageError, match=r"(?s)cannot be evaluated:\n.*bad\.yml") as raised:
        evaluate(root, [PUSH], folder=parser.parent)
    assert message in str(raised.value)
    assert "good.yml" not in str(raised.value)


def test_every_refusal_of_the_parser_is_reported(parser: Path, write_workflows: Write) -> None:
    bad = GOOD.replace("runs-on", "runs_on")
    root = write_workflows({"one": bad, "two": bad})
    with pytest.raises(UsageError, match=r"(?s)one\.yml.*two\.yml"):
        evaluate(root, [PUSH], folder=parser.parent)


def test_cases_are_independent(parser: Path, write_workflows: Write) -> None:
    root = write_workflows({"one": GOOD})
    other = PUSH.model_copy(update={"name": "other", "event_name": "issues"})
    first, second, third = evaluate(root, [PUSH, other, PUSH], folder=parser.parent)
    assert (len(first.jobs), len(second.jobs)) == (1, 0)
    assert first == third


def test_a_case_without_required_fields_is_refused() -> None:
    github = {name: GITHUB[name] for name in ("sha", "repository")}
    with pytest.raises(ValidationError, match="github lacks ref, run_id"):
        EventCase(name="push", event_name="push", event={}, github=github)


def test_a_checkout_without_workflows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no workflow; name a checkout of assay"):
        evaluate(tmp_path, [PUSH])


def test_a_missing_node_is_reported(
    write_workflows: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_workflows({"one": GOOD})
    with pytest.raises(MachineError, match=r"there is no .*absent\nNext: nox -s runners"):
        evaluate(root, [PUSH], tmp_path / "absent")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match=r"no node on the path\nNext: nox -s runners"):
        evaluate(root, [PUSH])


def test_missing_packages_are_reported(write_workflows: Write, tmp_path: Path) -> None:
    root = write_workflows({"one": GOOD})
    with pytest.raises(MachineError, match=r"lacks GitHub's packages(?s:.*)Next: nox -s runners"):
        evaluate(root, [PUSH], Path(sys.executable), folder=tmp_path / "nowhere")


def test_a_bundle_of_other_sources_is_refused(write_workflows: Write, tmp_path: Path) -> None:
    (tmp_path / BUNDLE).write_text("", encoding="utf-8")
    (tmp_path / STAMP).write_text("of yesterday", encoding="utf-8")
    root = write_workflows({"one": GOOD})
    with pytest.raises(MachineError, match="has them for other sources than these"):
        evaluate(root, [PUSH], Path(sys.executable), folder=tmp_path)


def test_a_crash_of_node_is_a_machine_error(write_workflows: Write, tmp_path: Path) -> None:
    (tmp_path / BUNDLE).write_text("import sys; sys.exit('broke')", encoding="utf-8")
    (tmp_path / STAMP).write_text(hash_sources(), encoding="utf-8")
    root = write_workflows({"one": GOOD})
    # Python replaces node; sys.exit with a text exits with 1.
    with pytest.raises(UsageError, match="broke"):
        evaluate(root, [PUSH], Path(sys.executable), folder=tmp_path)
    (tmp_path / BUNDLE).write_text("import sys; sys.exit(70)", encoding="utf-8")
    with pytest.raises(MachineError, match="ended with exit code 70"):
        evaluate(root, [PUSH], Path(sys.executable), folder=tmp_path)


def test_a_hung_node_is_killed(
    write_workflows: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflows_module, "_TIMEOUT_SECONDS", 0.5)
    (tmp_path / BUNDLE).write_text("import time; time.sleep(60)", encoding="utf-8")
    (tmp_path / STAMP).write_text(hash_sources(), encoding="utf-8")
    with pytest.raises(MachineError, match=r"timed out after 0\.5 seconds"):
        evaluate(write_workflows({"one": GOOD}), [PUSH], Path(sys.executable), folder=tmp_path)


def test_a_failure_of_npm_is_reported(tmp_path: Path) -> None:
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho no such package >&2\nexit 3\n", encoding="utf-8")
    npm.chmod(0o755)
    folder = tmp_path / "installed"
    with pytest.raises(MachineError, match=r"npm ci .* ended with exit code 3:\nno such package"):
        install(folder, npm)
    assert not (folder / STAMP).exists()


def test_installed_packages_are_not_installed_again(tmp_path: Path) -> None:
    (tmp_path / BUNDLE).write_text("", encoding="utf-8")
    (tmp_path / STAMP).write_text(hash_sources(), encoding="utf-8")
    assert install(tmp_path, tmp_path / "no-npm") == tmp_path / BUNDLE


def test_the_lock_has_no_host_and_only_exact_versions() -> None:
    wanted = json.loads((SOURCES / "package.json").read_text(encoding="utf-8"))
    text = (SOURCES / "package-lock.json").read_text(encoding="utf-8")
    assert "://" not in text
    assert "resolved" not in text
    locked = json.loads(text)["packages"]
    for name, version in (wanted["dependencies"] | wanted["devDependencies"]).items():
        assert re.fullmatch(r"\d+\.\d+\.\d+", version)
        assert locked[f"node_modules/{name}"]["version"] == version
    packages = [one for path, one in locked.items() if path]
    assert all("integrity" in one for one in packages)
    assert not any(
        one.get("hasInstallScript") and name != "node_modules/esbuild"
        for name, one in locked.items()
    )
