"""Writing files whole, and records that carry a digest."""

import errno
import json
import os
import random
from pathlib import Path

import pytest
from pydantic import BaseModel

from assay.files import (
    DiskError,
    UnreadableFileError,
    content_digest,
    read_sealed,
    seal,
    write_sealed,
    write_whole,
)


class Sample(BaseModel):
    name: str
    values: list[float]


SAMPLE = Sample(name="a", values=[0.1, 1e300, 3.0])


def test_no_link_redirects_what_is_written(tmp_path: Path) -> None:
    victim, target = tmp_path / "victim", tmp_path / "run" / "report.html"
    victim.write_text("precious")
    target.parent.mkdir()
    (target.parent / "report.html.part").symlink_to(victim)
    target.symlink_to(victim)
    write_whole(target, "new")
    assert victim.read_text() == "precious"
    assert not target.is_symlink()
    assert target.read_text() == "new"


def test_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    assert write_whole(tmp_path / "x", b"\r\n\xff").read_bytes() == b"\r\n\xff"


def test_the_temporary_name_cannot_be_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    real_replace = Path.replace

    def watch(path: Path, target: Path) -> Path:
        names.append(path.name)
        return real_replace(path, target)

    monkeypatch.setattr(Path, "replace", watch)
    for _ in range(2):
        write_whole(tmp_path / "x", "text")
    assert len(set(names)) == 2
    assert all(len(name) > 16 for name in names)


def test_new_files_have_the_permissions_of_others(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    path = write_whole(tmp_path / "x", "")
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_refused_file_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_whole(tmp_path / "x", "old")

    def refuse(_path: Path, _target: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(DiskError, match=r"^cannot write .*/x: No space left on device$"):
        write_whole(path, "new")
    assert [file.name for file in tmp_path.iterdir()] == ["x"]
    assert path.read_text() == "old"


def test_a_sealed_record_is_read_back(tmp_path: Path) -> None:
    assert read_sealed(Sample, write_sealed(tmp_path / "x", SAMPLE)) == SAMPLE


def test_the_order_of_keys_has_no_effect() -> None:
    assert content_digest({"a": 1, "b": 2}) == content_digest({"b": 2, "a": 1, "digest": "x"})


@pytest.mark.parametrize("seed", range(200))
def test_one_changed_byte_is_an_error_or_changes_nothing(tmp_path: Path, seed: int) -> None:
    path = write_sealed(tmp_path / "x", SAMPLE)
    data = bytearray(path.read_bytes())
    chosen = random.Random(seed)  # noqa: S311 - a reproducible order, no secret
    data[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
    path.write_bytes(data)
    try:
        read = read_sealed(Sample, path)
    except UnreadableFileError:
        return
    assert read == SAMPLE


class Counted(BaseModel):
    count: int = 0
    flag: bool = False
    note: str = ""


class Counts(BaseModel):
    by_name: dict[str, list[Counted]]
    threshold: float | None = None


def test_a_missing_number_of_a_sealed_record_is_refused_and_not_its_default(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text(seal({"by_name": {"a": [{"count": 2}, {"count": 0}]}}))
    assert read_sealed(Counts, path).by_name["a"] == [Counted(count=2), Counted(count=0)]

    path.write_text(seal({"by_name": {"a": [{"count": 2}, {"flag": True}]}}))
    with pytest.raises(
        UnreadableFileError, match="x: count is missing, unlike in this version of assay"
    ):
        read_sealed(Counts, path)


def test_a_record_without_a_digest_is_refused(tmp_path: Path) -> None:
    path = write_whole(tmp_path / "x", SAMPLE.model_dump_json())
    with pytest.raises(UnreadableFileError, match="it has no digest"):
        read_sealed(Sample, path)


def test_a_sealed_text_is_json_with_the_digest_last() -> None:
    assert list(json.loads(seal({"a": 1}))) == ["a", "digest"]
