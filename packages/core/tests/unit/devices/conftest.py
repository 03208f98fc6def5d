"""Packages of vendors that do not exist, installed for one test."""

from collections.abc import Callable
from pathlib import Path

import pytest

InstallVendor = Callable[..., None]


@pytest.fixture
def install_vendor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InstallVendor:
    """Install a module with an adapter: `install_vendor(device, code, "Class")`.

    The package is found by its metadata on the path, as any other; other processes see it, too.
    """
    monkeypatch.syspath_prepend(tmp_path)

    def install(device: str, code: str, class_name: str) -> None:
        module = f"vendor_of_{device}"
        (tmp_path / f"{module}.py").write_text(code)
        metadata = tmp_path / f"{module}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(
            f"[assay.devices]\n{device} = {module}:{class_name}\n"
        )

    return install


@pytest.fixture
def acme_code() -> str:
    """The source of a whole adapter, `AcmeDevice`."""
    return (Path(__file__).parent / "acme.py").read_text()
