"""Traces behind URLs, in the storage that fsspec keeps in memory."""

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import pytest
import torch

from assay.errors import MachineError, UsageError
from assay.files import Url, parse_location
from assay.trace import RemoteCopy, StorageError, Trace, TraceError, TraceWriter, remote
from assay.trace.remote import Store, list_names
from packages.core.tests.unit.trace.conftest import CallAt

URL = "memory://bucket/run"


class BrokenLinkError(Exception):
    pass


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    yield
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


@pytest.fixture(autouse=True)
def spools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of spools and copies."""
    folder = tmp_path / "spools"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the files in the order in which they were stored."""
    names: list[str] = []
    for method in ("create", "write", "upload"):
        original = getattr(Store, method)

        def note(self: Store, name: str, data: object, original: object = original) -> None:
            original(self, name, data)  # type: ignore[operator]
            names.append(name)

        monkeypatch.setattr(Store, method, note)
    return names


def write_steps(writer: TraceWriter, call_at: CallAt, steps: range) -> None:
    for step in steps:
        writer.add(call_at(step, "a", step), {"output": torch.full((5,), float(step))})
        writer.flush()


def steps_in(url: str) -> list[int]:
    copy = RemoteCopy(Url(url))
    trace = Trace.open(copy.path)
    # The manifest of an incomplete trace has no hash of the index.
    damage = [line for line in trace.find_damage() if trace.complete or "index.jsonl" not in line]
    assert damage == []
    return [call.site.step for call in trace.calls]


def wait_for(condition: object) -> None:
    for _ in range(500):
        if condition():  # type: ignore[operator]
            return
        time.sleep(0.01)
    raise AssertionError("timed out")


def test_remote_trace_is_byte_for_byte_the_local_one(tmp_path: Path, call_at: CallAt) -> None:
    for folder in (str(tmp_path / "run"), URL):
        with TraceWriter(folder, {"model": "m"}) as writer:
            write_steps(writer, call_at, range(2))
            writer.attach("noise", {"a": torch.ones(2)})
            writer.attach_json("tokens", [[1, 2]])
    local = {
        str(file.relative_to(tmp_path / "run")): file.read_bytes()
        for file in (tmp_path / "run").rglob("*")
        if file.is_file()
    }
    files = fsspec.filesystem("memory")
    remote = {name: files.cat_file(f"/bucket/run/{name}") for name in list_names(Url(URL))}
    assert len(local) == 6
    assert remote == local


def test_file_is_stored_before_the_index_that_names_it(call_at: CallAt, stored: list[str]) -> None:
    with TraceWriter(URL, {}) as writer:
        write_steps(writer, call_at, range(2))
        wait_for(lambda: "index.jsonl" in stored)
        writer.attach("noise", {"a": torch.ones(2)})
    first_index = stored.index("index.jsonl")
    assert stored[0] == "manifest.json"
    assert "shard-000000.safetensors" in stored[:first_index]
    assert stored[-3:] == ["attachments/noise.safetensors", "index.jsonl", "manifest.json"]


def test_many_flushes_share_one_index(call_at: CallAt, stored: list[str]) -> None:
    with TraceWriter(URL, {}) as writer:
        write_steps(writer, call_at, range(100))
    assert len([name for name in stored if name.startswith("shard-")]) == 100
    assert stored.count("index.jsonl") < 10


def test_kill_between_shard_and_index_leaves_the_earlier_calls(
    call_at: CallAt, stored: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_INDEX_SECONDS", 0.0)
    writer = TraceWriter(URL, {})
    write_steps(writer, call_at, range(1))
    wait_for(lambda: "index.jsonl" in stored)
    killed = threading.Event()
    monkeypatch.setattr(Store, "write", lambda *_: killed.wait())  # as if the process ended here
    write_steps(writer, call_at, range(1, 2))
    wait_for(lambda: "shard-000001.safetensors" in stored)

    copy = RemoteCopy(Url(URL))
    trace = Trace.open(copy.path)

    assert (copy.path / "shard-000001.safetensors").is_file()
    assert [call.site.step for call in trace.calls] == [0]
    assert not trace.complete
    killed.set()
    writer.close()


def test_temporary_failures_are_retried(
    call_at: CallAt, stored: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_FIRST_PAUSE_SECONDS", 0.01)
    attempts = itertools.count()
    original = Store.upload

    def fail_twice(self: Store, name: str, file: Path) -> None:
        if next(attempts) < 2:
            raise BrokenLinkError
        original(self, name, file)

    monkeypatch.setattr(Store, "upload", fail_twice)
    with TraceWriter(URL, {}) as writer:
        write_steps(writer, call_at, range(2))
    assert next(attempts) == 5  # two shards and a manifest
    assert steps_in(URL) == [0, 1]


def test_lost_storage_ends_the_capture_with_one_message_and_no_exception(
    call_at: CallAt,
    stored: list[str],
    spools: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(remote, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(remote, "_INDEX_SECONDS", 0.0)
    with TraceWriter(URL, {}) as writer:
        write_steps(writer, call_at, range(1))
        wait_for(lambda: "index.jsonl" in stored)

        def refuse(*_: object) -> None:
            raise BrokenLinkError("http://host/x?signature=secret went away")

        monkeypatch.setattr(Store, "upload", refuse)
        write_steps(writer, call_at, range(1, 2))
        wait_for(lambda: writer._folder.is_lost)
        index = next(spools.rglob("index.jsonl"))
        size = index.stat().st_size
        write_steps(writer, call_at, range(2, 9))
        assert index.stat().st_size == size
        writer.attach("noise", {"a": torch.ones(2)})
        assert [file.name for file in spools.rglob("*-00000[2-9]*")] == []
    assert capsys.readouterr().err == (
        "assay: the capture ended, as memory://bucket/run could not be written for 0 s:"
        " BrokenLinkError: http://host/x went away. What it lists up to here is intact.\n"
    )
    assert steps_in(URL) == [0]
    copy = RemoteCopy(Url(URL))
    assert not Trace.open(copy.path).complete


def test_exception_in_the_model_stores_the_calls_before_it(call_at: CallAt) -> None:
    def record() -> None:
        with TraceWriter(URL, {}) as writer:
            writer.add(call_at(0), {"output": torch.ones(1)})
            raise BrokenLinkError

    with pytest.raises(BrokenLinkError):
        record()
    copy = RemoteCopy(Url(URL))
    assert len(Trace.open(copy.path).calls) == 1
    assert not Trace.open(copy.path).complete


def test_full_spool_makes_the_writer_wait(
    call_at: CallAt, spools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "SPOOL_BYTES", 100_000)
    is_open = threading.Event()
    original = Store.upload

    def wait_and_upload(self: Store, name: str, file: Path) -> None:
        is_open.wait()
        original(self, name, file)

    monkeypatch.setattr(Store, "upload", wait_and_upload)
    num_written = 0

    def write() -> None:
        nonlocal num_written
        with TraceWriter(URL, {}) as writer:
            for step in range(8):
                values = torch.full((10_000,), float(step))  # 40 kB, and 64 kB of header at first
                writer.add(call_at(step, "a", step), {"output": values})
                writer.flush()
                num_written += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        wait_for(lambda: num_written == 1)
        time.sleep(0.2)
        assert num_written == 1
        assert sum(file.stat().st_size for file in spools.rglob("shard-*")) < 200_000
    finally:
        is_open.set()
        thread.join()
    assert steps_in(URL) == list(range(8))


def test_spool_and_copy_are_removed(call_at: CallAt, spools: Path) -> None:
    with TraceWriter(URL, {}) as writer:
        write_steps(writer, call_at, range(3))
        wait_for(lambda: not list(spools.rglob("shard-*")))  # while the trace is still written
        assert len(list(spools.iterdir())) == 1
    assert list(spools.iterdir()) == []
    copy = RemoteCopy(Url(URL))
    assert len(list(spools.iterdir())) == 1
    del copy
    assert list(spools.iterdir()) == []


def test_ranks_share_a_prefix_and_a_second_run_is_refused(call_at: CallAt) -> None:
    for rank in range(2):
        with TraceWriter(Url(URL) / f"rank-{rank}", {}) as writer:
            write_steps(writer, call_at, range(1))
    with pytest.raises(TraceError, match=r"^memory://bucket/run is not empty \(it holds rank-0, r"):
        TraceWriter(URL, {})


def test_second_writer_is_refused_even_if_the_prefix_was_empty_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer = TraceWriter(URL, {})
    monkeypatch.setattr(Store, "top_names", lambda _: [])
    with pytest.raises(TraceError, match=r"^memory://bucket/run is being written by another run"):
        TraceWriter(URL, {})
    writer.close()


@pytest.mark.parametrize("method", ["ls", "pipe_file"])
def test_unreachable_storage_is_an_error_before_the_run(
    spools: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BrokenLinkError("no route to http://host/bucket?list&key=secret")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), method, refuse)
    with pytest.raises(StorageError) as caught:
        TraceWriter(URL, {})
    assert isinstance(caught.value, MachineError)
    text = "cannot open memory://bucket/run: BrokenLinkError: no route to http://host/bucket"
    assert str(caught.value) == text
    assert list(spools.iterdir()) == []


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    with pytest.raises(UsageError, match=r"^gcs://bucket/run cannot be opened: .*install gcsfs"):
        TraceWriter("gcs://bucket/run", {})
    with pytest.raises(UsageError, match=r"^nosuch://x cannot be opened: Protocol not known"):
        TraceWriter("nosuch://x", {})


def test_password_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(UsageError, match=r"^the s3:// URL holds a password") as caught:
        parse_location("s3://key:secret@bucket/run")
    assert "secret" not in str(caught.value)


def test_file_urls_are_folders(tmp_path: Path, call_at: CallAt) -> None:
    with TraceWriter(f"file://{tmp_path}/run", {}) as writer:
        write_steps(writer, call_at, range(1))
    assert len(Trace.open(tmp_path / "run").calls) == 1


def test_name_that_leads_out_of_the_copy_is_refused(
    spools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TraceWriter(URL, {}).close()
    found = {"/bucket/run/../../x": {"size": 1}, "/bucket/run/manifest.json": {"size": 1}}
    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "find", lambda *_, **__: found)
    with pytest.raises(TraceError, match=r"holds '\.\./\.\./x', which is not the name of a file"):
        RemoteCopy(Url(URL))


def test_flipped_bit_is_named_with_its_site(call_at: CallAt) -> None:
    with TraceWriter(URL, {}) as writer:
        write_steps(writer, call_at, range(3))
    files = fsspec.filesystem("memory")
    data = bytearray(files.cat_file("/bucket/run/shard-000001.safetensors"))
    data[-3] ^= 4
    files.pipe_file("/bucket/run/shard-000001.safetensors", bytes(data))
    copy = RemoteCopy(Url(URL))
    assert Trace.open(copy.path).find_damage() == [
        "shard-000001.safetensors: the values of a:output forward step 1"
    ]


def test_copy_of_a_running_capture_has_all_files_of_its_index(
    call_at: CallAt, stored: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_INDEX_SECONDS", 0.0)
    monkeypatch.setattr(remote, "_INDEX_PAUSE_RATIO", 0.0)
    writer = TraceWriter(URL, {})
    steps = itertools.count()
    original = Store.sizes

    def write_a_step() -> None:
        step = next(steps)
        write_steps(writer, call_at, range(step, step + 1))
        wait_for(lambda: stored.count("index.jsonl") == step + 1)

    def list_then_write(self: Store) -> dict[str, int]:
        sizes = original(self)
        write_a_step()
        return sizes

    write_a_step()
    monkeypatch.setattr(Store, "sizes", list_then_write)
    assert steps_in(URL) == [0, 1]
    writer.close()
