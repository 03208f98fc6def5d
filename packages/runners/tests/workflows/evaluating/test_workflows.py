"""Errors in the workflows, and in node and its packages."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from assay.errors import MachineError, UsageError
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
        ("on: push\njobs: {run: {runs-on: x, if: 'matrix.a == 1'}}", "named-value: 'matrix'"),
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


def test_a_checkout_without_workflows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no workflow; name a checkout of assay"):
        evaluate(tmp_path, [PUSH])


def test_a_failure_of_npm_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho no such package >&2\nexit 3\n", encoding="utf-8")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    folder = tmp_path / "installed"
    with pytest.raises(MachineError, match=r"npm ci .* ended with exit code 3:\nno such package"):
        install(folder)
    assert not (folder / STAMP).exists()
    # Packages that are up to date are not installed again.
    (folder / BUNDLE).write_text("", encoding="utf-8")
    (folder / STAMP).write_text(hash_sources(), encoding="utf-8")
    assert install(folder) == folder / BUNDLE
    (folder / STAMP).write_text("of yesterday", encoding="utf-8")
    with pytest.raises(MachineError):
        install(folder)


def test_a_crash_of_node_is_a_machine_error(write_workflows: Write, tmp_path: Path) -> None:
    (tmp_path / BUNDLE).write_text("process.exit(70)", encoding="utf-8")
    with pytest.raises(MachineError, match="ended with exit code 70"):
        evaluate(write_workflows({"one": GOOD}), [PUSH], folder=tmp_path)


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
