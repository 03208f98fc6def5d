"""runners.toml: one whole entry a vendor, in agreement with the device adapters."""

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

FIELDS = {"title", "labels", "resources", "shown", "torch"}
OPTIONAL_FIELDS = {"scheduler", "unverified"}


@pytest.fixture(scope="module")
def entries(root: Path) -> dict[str, dict[str, Any]]:
    text = (root / "runners/runners.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def test_every_vendor_has_a_whole_entry(entries: dict[str, dict[str, Any]]) -> None:
    assert set(entries) == {
        "cpu", "nvidia", "amd", "intel", "gaudi", "spyre", "trainium", "ascend", "apple"
    }  # fmt: skip
    for name, entry in entries.items():
        assert set(entry) >= FIELDS, name
        assert set(entry) <= FIELDS | OPTIONAL_FIELDS, name
        assert set(entry.get("unverified", [])) <= FIELDS, name


def test_labels_name_one_vendor_each(entries: dict[str, dict[str, Any]]) -> None:
    labels = [label for entry in entries.values() for label in entry["labels"]]
    assert len(labels) == len(set(labels))
    for name, entry in entries.items():
        assert entry["labels"][0] == f"assay-{name}"
        # Limits of the scale set chart: runnerScaleSetName at most 45, labels under 256 characters.
        assert all(re.fullmatch(r"[a-z0-9-]{1,45}", label) for label in entry["labels"])


def test_kubernetes_resources_are_qualified_names(entries: dict[str, dict[str, Any]]) -> None:
    for name, entry in entries.items():
        assert bool(entry["resources"]) == (name not in ("cpu", "apple"))
        for resource in entry["resources"]:
            assert re.fullmatch(r"[a-z.]+/[A-Za-z0-9_]+", resource)


def test_labels_of_device_adapters_have_runners(
    root: Path, entries: dict[str, dict[str, Any]]
) -> None:
    known = {label for entry in entries.values() for label in entry["labels"]}
    named = {
        node.value
        for path in sorted(root.glob("packages/*/src/**/devices/**/*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and re.fullmatch(r"assay-[a-z0-9-]+", str(node.value))
    }
    assert "assay-cpu" in named
    assert named - known == set()
