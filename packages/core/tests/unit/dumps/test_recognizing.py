"""Choice of the reader for a path, and errors without one."""

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from assay.dumps import recognizing
from assay.dumps.protocol import Dump, DumpError
from assay.dumps.recognizing import open_dump, readers
from assay.files import UnreadableFileError

KNOWN = f"known formats: {', '.join(one.name for one in readers() if one.name != 'unsupported')}"


class FirstReader:
    """Reader that accepts every path."""

    name = "first"

    def recognize(self, path: Path) -> bool:
        return path.exists()

    def open(self, path: Path) -> Dump:
        return Dump(format=self.name, path=path, tensors=[])


class BrokenReader:
    """Reader that fails to construct."""

    def __init__(self) -> None:
        raise ImportError("no module named acme")


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[type], None]]:
    def replace(reader: type) -> None:
        entry = EntryPoint("added", f"{__name__}:{reader.__name__}", "assay.readers")
        monkeypatch.setattr(EntryPoint, "load", lambda _: reader)
        monkeypatch.setattr(recognizing, "entry_points", lambda group: [entry])
        readers.cache_clear()

    yield replace
    readers.cache_clear()


@pytest.fixture
def tensor_file(tmp_path: Path) -> Path:
    np.save(tmp_path / "a.npy", np.zeros(2))
    return tmp_path / "a.npy"


def test_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(DumpError) as raised:
        open_dump(tmp_path / "absent")
    assert str(raised.value) == f"there is no file or folder {tmp_path / 'absent'}"


def test_folder_of_no_format_lists_the_formats(tmp_path: Path) -> None:
    (tmp_path / "notes.md").touch()
    with pytest.raises(DumpError) as raised:
        open_dump(tmp_path)
    assert str(raised.value) == f"{tmp_path} is not a dump of a known format; {KNOWN}"


def test_format_that_does_not_fit_is_named(tensor_file: Path) -> None:
    with pytest.raises(DumpError) as raised:
        open_dump(tensor_file, "msprobe")
    assert str(raised.value) == f"{tensor_file} is not a dump of format msprobe; {KNOWN}"


@pytest.mark.parametrize("name", ["onnx", "unsupported"])
def test_unknown_format_is_refused(tensor_file: Path, name: str) -> None:
    with pytest.raises(DumpError) as raised:
        open_dump(tensor_file, name)
    assert str(raised.value) == f"unknown format '{name}'; {KNOWN}"


def test_named_format_is_used(tensor_file: Path) -> None:
    assert open_dump(tensor_file, "tensors").format == "tensors"


def test_text_is_a_path(tensor_file: Path) -> None:
    assert open_dump(str(tensor_file)).format == "tensors"


def test_readers_of_other_packages_are_asked_first(
    tensor_file: Path, register: Callable[[type], None]
) -> None:
    register(FirstReader)
    assert open_dump(tensor_file).format == "first"
    assert open_dump(tensor_file, "tensors").format == "tensors"


def test_reader_that_cannot_be_loaded_is_named(
    tensor_file: Path, register: Callable[[type], None]
) -> None:
    register(BrokenReader)
    with pytest.raises(
        DumpError, match=r"the reader added cannot be loaded: .*no module named acme"
    ):
        open_dump(tensor_file)


@pytest.mark.parametrize("name", ["a" * 300, "loop", "~nobody-of-this-name"])
def test_path_that_the_system_refuses_is_one_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    path = name if name.startswith("~") else tmp_path / name
    with pytest.raises((DumpError, UnreadableFileError)):
        open_dump(path)
