import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from assay.errors import MachineError
from assay.sites import Call
from assay.trace import StorageError, Trace, TraceError, TraceWriter


def test_writer_that_is_killed_leaves_every_flushed_call(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    script = Path(__file__).with_name("killed_writer.py")
    with subprocess.Popen([sys.executable, script, folder], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        # Killed while it writes, at an arbitrary moment.
        last_line = [process.stdout.readline() for _ in range(20)][-1]
        process.send_signal(signal.SIGKILL)
        flushed = int((process.stdout.read().split(b"\n")[:-1] or [last_line])[-1])
    assert process.returncode == -signal.SIGKILL

    trace = Trace.open(folder)

    assert not trace.complete
    assert trace.manifest == {"endless": True}
    assert len(trace.calls) >= 4 * (flushed + 1)
    assert len(trace.calls) % 4 == 0
    for number, call in enumerate(trace.calls):
        values = trace.tensor(call, "output")
        assert (values.min().item(), values.max().item()) == (number, number)


@pytest.mark.parametrize("kept", range(0, 190, 7))
def test_truncated_last_line_is_ignored(two_steps: Path, tmp_path: Path, kept: int) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(two_steps, folder)
    first, second = (folder / "index.jsonl").read_bytes().splitlines(keepends=True)[:2]
    assert kept < len(second)
    (folder / "index.jsonl").write_bytes(first + second[:kept])
    manifest = (folder / "manifest.json").read_text()
    manifest = manifest.replace('"complete":true', '"complete":false')
    (folder / "manifest.json").write_text(manifest)

    trace = Trace.open(folder)

    assert [call.site.step for call in trace.calls] == [0]
    assert not trace.complete


def test_files_of_a_killed_writer_outside_its_index_are_ignored(two_steps: Path) -> None:
    (two_steps / "shard-000007.safetensors").write_bytes(b"not indexed")
    (two_steps / "shard-000008.safetensors.part").write_bytes(b"")
    assert len(Trace.open(two_steps).calls) == 2


def test_writer_killed_before_its_first_flush_leaves_an_empty_trace(
    tmp_path: Path, call_at: Callable[..., Call]
) -> None:
    writer = TraceWriter(tmp_path / "t", {})
    assert Trace.open(tmp_path / "t").calls == ()
    writer.add(call_at(0), {"output": torch.ones(1)})
    assert Trace.open(tmp_path / "t").calls == ()
    (tmp_path / "t/index.jsonl").unlink()
    assert not Trace.open(tmp_path / "t").complete


class BrokenModelError(Exception):
    pass


@pytest.mark.parametrize("error", [BrokenModelError, KeyboardInterrupt])
def test_exception_keeps_recorded_calls_and_propagates(
    tmp_path: Path, call_at: Callable[..., Call], error: type[BaseException]
) -> None:
    writer = TraceWriter(tmp_path / "t", {})

    def record() -> None:
        with writer:
            writer.add(call_at(0), {"output": torch.ones(1)})
            raise error

    with pytest.raises(error):
        record()
    trace = Trace.open(tmp_path / "t")
    assert len(trace.calls) == 1
    assert not trace.complete
    with pytest.raises(StorageError, match="closed after an error"):
        writer.add(call_at(1), {})


def test_interrupt_in_the_middle_of_a_write_keeps_the_earlier_flushes(
    tmp_path: Path, call_at: Callable[..., Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    def record() -> None:
        with TraceWriter(tmp_path / "t", {}) as writer:
            writer.add(call_at(0, "a"), {"output": torch.ones(1)})
            writer.flush()
            monkeypatch.setattr(os, "pwrite", interrupt)
            writer.add(call_at(1, "b"), {"output": torch.zeros(1)})

    with pytest.raises(KeyboardInterrupt):
        record()

    trace = Trace.open(tmp_path / "t")
    assert [call.site.module for call in trace.calls] == ["a"]
    assert not trace.complete
    assert list((tmp_path / "t").glob("*.part")) == []


def test_second_close_does_nothing(tmp_path: Path, call_at: Callable[..., Call]) -> None:
    with TraceWriter(tmp_path / "t", {}) as writer:
        writer.close()
    writer.close()
    with pytest.raises(StorageError, match="is closed: nothing more can be recorded"):
        writer.add(call_at(0), {})


def test_full_disk_is_one_clear_error_and_keeps_the_earlier_flushes(
    tmp_path: Path, call_at: Callable[..., Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    real_pwrite = os.pwrite

    def half_then_full(descriptor: int, data: memoryview, offset: int) -> int:
        if len(data) > 1000:
            return real_pwrite(descriptor, data[:1000], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = TraceWriter(tmp_path / "t", {})

    def record() -> None:
        with writer:
            writer.add(call_at(0, "a"), {"output": torch.ones(1000)})
            writer.flush()
            monkeypatch.setattr(os, "pwrite", half_then_full)
            writer.add(call_at(1, "b"), {"output": torch.zeros(1000)})

    with pytest.raises(StorageError, match=r"No space left on device \(\d+\.\d GB free") as e:
        record()
    monkeypatch.undo()

    assert isinstance(e.value, MachineError)
    assert str(tmp_path / "t/shard-000001.safetensors") in str(e.value)
    trace = Trace.open(tmp_path / "t")
    assert [call.site.module for call in trace.calls] == ["a"]
    assert not trace.complete
    assert list((tmp_path / "t").glob("*.part")) == []
    with pytest.raises(StorageError, match="No space left"):
        writer.flush()


def test_line_that_does_not_fit_on_the_disk_is_removed(
    tmp_path: Path, call_at: Callable[..., Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write = os.write

    def half_then_full(descriptor: int, data: memoryview) -> int:
        if len(data) > 20:
            return real_write(descriptor, data[:20])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = TraceWriter(tmp_path / "t", {})
    writer.add(call_at(0), {"output": torch.ones(1)})
    monkeypatch.setattr(os, "write", half_then_full)
    with pytest.raises(StorageError, match=r"index.jsonl: No space left"):
        writer.flush()
    monkeypatch.undo()

    assert (tmp_path / "t/index.jsonl").read_bytes() == b""
    assert Trace.open(tmp_path / "t").calls == ()


def test_file_size_limit_ends_a_write_cleanly(tmp_path: Path) -> None:
    # A real refusal by the kernel: files of at most 1 MB, and Python ignores SIGXFSZ.
    script = f"""
import resource, torch
from assay.sites import Call, CallSite
from assay.trace import StorageError, Trace, TraceWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
folder = {str(tmp_path / "t")!r}
try:
    with TraceWriter(folder, {{}}) as writer:
        for order in range(3):
            values = torch.full((100_000 * (order + 1),), float(order))
            writer.add(Call(CallSite(order, "m"), "Linear", None, order), {{"output": values}})
            writer.flush()
except StorageError as error:
    print(error)
print([call.site.step for call in Trace.open(folder).calls])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=100
    )
    message, steps = done.stdout.splitlines()
    assert re.search(r"shard-000002\.safetensors: File too large \(.* GB free there\)", message)
    assert steps == "[0, 1]"


def test_folder_that_cannot_be_created_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot create the folder .*file/t: Not a directory"):
        TraceWriter(tmp_path / "file/t", {})
    with pytest.raises(StorageError, match=r"cannot create the folder .*file: File exists"):
        TraceWriter(tmp_path / "file", {})


def test_read_only_folder_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The superuser, whom containers run tests as, may write anywhere: so the refusal is planted.
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError, match=r"manifest\.json: Read-only file system$"):
        TraceWriter(tmp_path / "t", {})


def test_folder_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(TraceError, match=r"is not empty \(it holds notes\.txt\): name a new"):
        TraceWriter(tmp_path, {})


def test_one_of_many_writers_gets_the_folder(tmp_path: Path) -> None:
    start = threading.Barrier(8)
    outcomes: list[str] = []

    def write() -> None:
        start.wait()
        try:
            TraceWriter(tmp_path / "t", {})
            outcomes.append("won")
        except TraceError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert outcomes.count("won") == 1
    assert all(
        "is being written by another run" in text or "is not empty" in text
        for text in outcomes
        if text != "won"
    )


def test_second_writer_is_refused_even_if_the_folder_was_empty_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TraceWriter(tmp_path / "t", {})
    monkeypatch.setattr(os, "listdir", lambda _: [])
    with pytest.raises(TraceError, match="is being written by another run: name a new folder"):
        TraceWriter(tmp_path / "t", {})


def test_manifest_that_is_not_json_is_refused_before_any_write(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"manifest of a trace must be JSON: .*set"):
        TraceWriter(tmp_path / "t", {"x": {1}})  # type: ignore[dict-item]
    assert list(tmp_path.glob("t/*")) == []
