from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from assay.sites import Call
from assay.trace import Trace, TraceError, TraceWriter


def test_attachments_are_read_back(two_steps: Path) -> None:
    trace = Trace.open(two_steps)
    assert trace.attachments == ("noise", "tokens")
    assert trace.attachment("noise")["a"].tolist() == [1.0, 2.0]
    assert trace.attachment_json("tokens") == [[1, 2], [3]]
    with pytest.raises(TraceError, match=r"holds no attachment 'logits' \(tensors\).*noise"):
        trace.attachment("logits")
    with pytest.raises(TraceError, match=r"holds no attachment 'noise' \(json\)"):
        trace.attachment_json("noise")


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "é"])
def test_attachment_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    with (
        TraceWriter(tmp_path / "t", {}) as writer,
        pytest.raises(TraceError, match="cannot name an attachment"),
    ):
        writer.attach_json(name, 1)


def test_attachment_is_written_once(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", {}) as writer:
        writer.attach_json("a", 1)
        with pytest.raises(TraceError, match="has an attachment 'a' already"):
            writer.attach("a", {})


def test_sparse_tensor_is_refused_and_the_trace_stays_usable(
    tmp_path: Path, call_at: Callable[..., Call]
) -> None:
    with TraceWriter(tmp_path / "t", {}) as writer:
        with pytest.raises(TraceError, match=r"output: cannot record a torch.sparse_coo float32"):
            writer.add(call_at(0, "a"), {"output": torch.ones(2).to_sparse()})
        with pytest.raises(TraceError, match="tensor on meta"):
            writer.attach("a", {"x": torch.ones(2, device="meta")})
        with pytest.raises(TraceError, match=r"constants are not JSON: .*dtype"):
            writer.add(call_at(1, "b", constants={"input.dtype": torch.float32}), {})
        writer.add(call_at(2, "c"), {"output": torch.ones(2)})
    assert [call.site.module for call in Trace.open(tmp_path / "t").calls] == ["c"]


def test_call_is_recorded_once(tmp_path: Path, call_at: Callable[..., Call]) -> None:
    with TraceWriter(tmp_path / "t", {}) as writer:
        writer.add(call_at(0), {})
        with pytest.raises(TraceError, match="recorded twice"):
            writer.add(call_at(1), {})


def test_missing_parts_are_reported_with_the_present_ones(
    two_steps: Path, call_at: Callable[..., Call]
) -> None:
    trace = Trace.open(two_steps)
    with pytest.raises(TraceError, match=r"holds no a:input\.x forward step 0; it holds: output"):
        trace.tensor(trace.calls[0], "input.x")
    with pytest.raises(TraceError, match=r"holds no call .*it holds: a:\* forward step 0, "):
        trace.tensor(call_at(0, "a", 9), "output")
