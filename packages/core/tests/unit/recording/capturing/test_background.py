import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from assay.recording.capture import capture
from assay.recording.capturing.background import BackgroundWriter, HostCopies
from assay.trace import Trace, TraceWriter
from assay.trace.files import OutStream


def test_copies_wait_for_room_and_use_memory_again() -> None:
    copies = HostCopies(max_bytes=20_000)
    first, second = copies.copy(torch.ones(2000)), copies.copy(torch.ones(2000))
    found = []
    thread = threading.Thread(target=lambda: found.append(copies.copy(torch.zeros(2000))))
    thread.start()
    thread.join(0.1)
    assert not found
    copies.release(first)
    thread.join(10)
    assert found[0].buffer is first.buffer
    assert torch.equal(second.value, torch.ones(2000))
    assert copies.used_bytes <= 20_000


def test_a_tensor_over_the_limit_waits_for_all_others() -> None:
    copies = HostCopies(max_bytes=1000)
    large = torch.randn(5000)
    assert torch.equal(copies.copy(large).value, large)


def test_a_tensor_is_recorded_before_it_changes_in_place(tmp_path: Path) -> None:
    class Adds(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x += 1
            return x

    with torch.no_grad(), capture(Adds(), tmp_path / "t") as running:
        x = torch.zeros(1000, 100)
        running.plan.model(x)
        x.zero_()
    trace = Trace.open(tmp_path / "t")
    (call,) = trace.calls
    values = {port: float(trace.tensor(call, port)[0, 0]) for port in call.ports}
    assert values == {"input.x": 0.0, "changed.x": 1.0, "output": 1.0}


def test_the_run_does_not_wait_for_a_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = OutStream.write_at

    def write_slowly(*arguments: Any) -> None:
        time.sleep(0.05)
        write(*arguments)

    monkeypatch.setattr(OutStream, "write_at", write_slowly)
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    with torch.no_grad(), capture(net, tmp_path / "t"):
        start = time.monotonic()
        net(torch.ones(2, 8))
        waited = time.monotonic() - start
    assert waited < 0.5 < time.monotonic() - start
    assert Trace.open(tmp_path / "t").complete


def test_a_full_disk_ends_the_capture_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    net = nn.Linear(8, 8)
    is_full = threading.Event()
    write = os.pwrite

    def write_until_full(*arguments: Any) -> int:
        if is_full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr("os.pwrite", write_until_full)
    with torch.no_grad(), capture(net, tmp_path / "t"):
        net(torch.ones(2, 8))
        net(torch.zeros(2, 8))
        while (tmp_path / "t" / "index.jsonl").read_text().count("\n") < 2:
            time.sleep(0.01)
        is_full.set()
        for number in range(2, 5):
            net(torch.full((2, 8), float(number)))
    trace = Trace.open(tmp_path / "t")
    assert not trace.complete
    assert {call.site.step for call in trace.calls} == {0, 1}
    message = capsys.readouterr().err
    assert message.count("assay: capture ended, and the run goes on: cannot write") == 1
    assert "GB free there" in message


def test_left_out_sparse_tensors_are_in_the_manifest(tmp_path: Path) -> None:
    writer = BackgroundWriter(TraceWriter(tmp_path / "t", {}), 1 << 20)
    with writer:
        assert writer.keep(torch.eye(2).to_sparse()).stored is None
        writer.wait()
    assert "torch.sparse_coo" in str(Trace.open(tmp_path / "t").manifest["left_out"])


def test_any_error_in_the_background_leaves_the_trace_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dead thread would block the run, or leave a trace that claims to be complete."""

    def fail(*_: object) -> None:
        raise RuntimeError("no such kernel")

    net = nn.Linear(8, 8)
    with torch.no_grad(), capture(net, tmp_path / "t"):
        net(torch.ones(2, 8))
        monkeypatch.setattr(TraceWriter, "store", fail)
        for _ in range(3):
            net(torch.rand(2, 8))
    assert not Trace.open(tmp_path / "t").complete
    assert "the run goes on: no such kernel" in capsys.readouterr().err
