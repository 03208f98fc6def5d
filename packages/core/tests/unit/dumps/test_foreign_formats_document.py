"""The example reader in docs/foreign-formats.md works."""

import json
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from assay.dumps import recognizing
from assay.dumps.recognizing import open_dump
from assay.files import UnreadableFileError

DOCUMENT = Path(__file__).resolve().parents[5] / "docs/foreign-formats.md"


def shown(language: str) -> str:
    text = DOCUMENT.read_text(encoding="utf-8")
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return str(block)


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the example as its own package would be."""
    (group, entries), *_ = tomllib.loads(shown("toml"))["project"]["entry-points"].items()
    ((name, value),) = entries.items()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / f"{value.partition(':')[0]}.py").write_text(shown("python"))
    monkeypatch.syspath_prepend(tmp_path / "package")
    found = [EntryPoint(name, value, group)]
    monkeypatch.setattr(
        recognizing, "entry_points", lambda group: found if group == "assay.readers" else []
    )
    recognizing.readers.cache_clear()
    yield
    recognizing.readers.cache_clear()


def write_dump(folder: Path, file: str = "0.npy") -> Path:
    folder.mkdir()
    np.save(folder / "0.npy", np.array([[1.5, -2.0]], dtype=np.float32))
    entry = {"token": 3, "module": "model.norm", "port": "output", "dtype": "float32"}
    index = {"version": "1.2", "tensors": [entry | {"shape": [1, 2], "file": file}]}
    (folder / "acme.json").write_text(json.dumps(index))
    return folder


@pytest.mark.usefixtures("registered")
def test_example_reads_a_dump(tmp_path: Path) -> None:
    dump = open_dump(write_dump(tmp_path / "dump"))

    (tensor,) = dump.tensors
    assert (dump.format, dict(dump.provenance)) == ("acme", {"tool": "Acme 1.2"})
    assert str(tensor.site) == "model.norm:output forward step 3"
    assert tensor.read().tolist() == [[1.5, -2.0]]


@pytest.mark.usefixtures("registered")
def test_example_reports_a_missing_file(tmp_path: Path) -> None:
    dump = open_dump(write_dump(tmp_path / "dump", "1.npy"))
    assert (list(dump.tensors), list(dump.problems)) == ([], ["1.npy is missing"])


@pytest.mark.usefixtures("registered")
def test_example_opens_no_file_outside_of_the_dump(tmp_path: Path) -> None:
    (tmp_path / "secret.npy").touch()
    with pytest.raises(UnreadableFileError, match="outside of the dump"):
        open_dump(write_dump(tmp_path / "dump", "../secret.npy"))


def test_example_is_short() -> None:
    assert len(shown("python").splitlines()) < 100
