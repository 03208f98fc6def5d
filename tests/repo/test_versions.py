"""The packages carry one version, install what the constraints pin, and explain it."""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from environments.release import is_released, require_release
from environments.shared import PACKAGES, PUBLISHED


def requirement_name(requirement: str) -> str:
    """The normalised name of a requirement, PEP 503."""
    name = re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def declared_requirements(manifest: dict[str, Any]) -> Iterable[str]:
    project = manifest.get("project", {})
    yield from project.get("dependencies", [])
    for extra in project.get("optional-dependencies", {}).values():
        yield from extra
    for group in manifest.get("dependency-groups", {}).values():
        yield from group


@pytest.fixture(scope="module")
def manifests(root: Path) -> dict[str, dict[str, Any]]:
    paths = [root / "pyproject.toml", *sorted(root.glob("packages/*/pyproject.toml"))]
    assert len(paths) == 6
    return {str(path): tomllib.loads(path.read_text(encoding="utf-8")) for path in paths}


@pytest.fixture(scope="module")
def packages(manifests: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [manifest["project"] for manifest in manifests.values() if "project" in manifest]


def test_all_packages_have_one_version(packages: list[dict[str, Any]]) -> None:
    assert len({package["version"] for package in packages}) == 1


def test_packages_need_each_other_in_that_version(packages: list[dict[str, Any]]) -> None:
    (version,) = {package["version"] for package in packages}
    siblings = [
        requirement
        for package in packages
        for requirement in package["dependencies"]
        if requirement.startswith("assay-")
    ]
    assert siblings
    assert [sibling for sibling in siblings if not sibling.endswith(f"=={version}")] == []


def test_the_readme_installs_what_exists(root: Path, packages: list[dict[str, Any]]) -> None:
    version = packages[0]["version"]
    changelog, readme = (
        (root / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "README.md")
    )
    released = is_released(version, changelog)
    assert ("pip install assay-core" in readme, "pip install ./packages/core" in readme) == (
        released, not released
    )  # fmt: skip


@pytest.mark.parametrize("ref", ["refs/tags/v1.2.0", "refs/heads/main", ""])
def test_the_tag_of_the_version_and_a_dry_run_are_released(ref: str) -> None:
    require_release(ref, "1.2.0", "# Changelog\n\n## 1.2.0 (2026-01-01)\n")
    assert ref != "refs/tags/v1.2.1"


@pytest.mark.parametrize(
    ("ref", "changelog", "message"),
    [
        ("refs/tags/v1.2.1", "", "the tag is v1.2.1, and the packages have version 1.2.0"),
        ("refs/tags/1.2.0", "", "the tag is 1.2.0, and the packages have version 1.2.0"),
        ("refs/tags/v1.2.0", "\n## 1.2.0rc1 (2026-01-01)", "CHANGELOG.md has no section '## 1.2.0"),
        ("refs/tags/v1.2.0", "\n## 1.2.0 (unreleased)", "CHANGELOG.md has no section '## 1.2.0"),
    ],
)
def test_another_tag_is_refused(ref: str, changelog: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        require_release(ref, "1.2.0", changelog)


def test_the_index_refuses_what_is_not_published(packages: list[dict[str, Any]]) -> None:
    refused = "Private :: Do Not Upload"
    private = {one["name"] for one in packages if refused in one.get("classifiers", ())}
    assert private == {"assay-runners"}
    assert {f"assay-{name}" for name in set(PACKAGES) - set(PUBLISHED)} == private
    needed = {
        need for one in packages if one["name"] not in private for need in one["dependencies"]
    }
    assert [need for need in needed if need.startswith("assay-runners")] == []


def test_packages_support_the_same_pythons(packages: list[dict[str, Any]]) -> None:
    assert {package["requires-python"] for package in packages} == {">=3.11,<3.15"}


def test_every_dependency_is_pinned_and_has_a_reason(
    root: Path, manifests: dict[str, dict[str, Any]]
) -> None:
    declared = {
        requirement_name(requirement)
        for manifest in manifests.values()
        for requirement in declared_requirements(manifest)
        if not requirement.startswith("assay-")
    }
    lines = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {requirement_name(line) for line in lines if "==" in line}
    reasons = (root / "docs/dependencies.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^\| ([\w.-]+)", reasons, re.MULTILINE)) - {"package"}
    assert declared - pinned == set(), "not in constraints.txt"
    assert {requirement_name(name) for name in explained} == declared


def test_a_requirement_is_reduced_to_its_name() -> None:
    assert requirement_name("Ruamel_yaml>=0.18,<1") == "ruamel-yaml"
    assert requirement_name("assay-core[tables]==0.1.0") == "assay-core"
