"""The adapter of docs/accelerators.md, as a reader would copy it from there."""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import assay.devices.conformance  # noqa: F401 - loaded here, it is not loaded anew in the run
from assay.devices.registry import detect

pytest_plugins = ("pytester",)

GUIDE = Path(__file__).parents[5] / "docs" / "accelerators.md"
FILE = re.compile(
    r"^```\w+\n((?:\"\"\"|# )([\w.]+\.(?:py|toml))\b.*?)^```", re.DOTALL | re.MULTILINE
)
ALONE = [f"-pno:{name}" for name in ("anyio", "benchmark", "hypothesispytest", "xdist")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The reader's, installed, without the stand-in."""
    files = {name: text for text, name in FILE.findall(GUIDE.read_text(encoding="utf-8"))}
    assert set(files) == {"acme_assay.py", "pyproject.toml", "torch_acme.py"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "torch_acme.py").rename(tmp_path / "later")
    project = tomllib.loads(files["pyproject.toml"])["project"]
    metadata = tmp_path / "acme_assay-1.0.dist-info"
    metadata.mkdir()
    name, version = project["name"], project["version"]
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    entry = project["entry-points"]["assay.devices"]["acme"]
    (metadata / "entry_points.txt").write_text(f"[assay.devices]\nacme = {entry}\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for module in ("acme_assay", "torch_acme"):
        sys.modules.pop(module, None)
    vars(torch).pop("acme", None)


def test_device_is_absent_until_the_makers_package_is_there(folder: Path) -> None:
    assert detect("acme")[0].missing == "the Python package torch_acme"


def test_adapter_on_its_stand_in_passes_the_suite(folder: Path, pytester: pytest.Pytester) -> None:
    (folder / "later").rename(folder / "torch_acme.py")
    adapter = folder / "acme_assay.py"
    line = '    package = "torch_acme"\n'
    adapter.write_text(adapter.read_text().replace(line, f'{line}    torch_device = "cpu"\n'))
    result = pytester.runpytest(
        *("--pyargs", "assay.devices.conformance", "--assay-device=acme/bfloat16", *ALONE)
    )
    result.assert_outcomes(passed=7)
