"""A small trace to read, and a short way to make a call."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from assay.sites import Call, CallSite
from assay.trace import TraceWriter

CallAt = Callable[..., Call]


@pytest.fixture
def call_at() -> CallAt:
    def build(order: int, module: str = "model", step: int = 0, **fields: object) -> Call:
        fields.setdefault("class_name", "Linear")
        fields.setdefault("caller", None)
        return Call(CallSite(step, module), order=order, **fields)  # type: ignore[arg-type]

    return build


@pytest.fixture
def two_steps(tmp_path: Path, call_at: CallAt) -> Path:
    """Two flushes, one shard each, and two attachments; complete."""
    folder = tmp_path / "trace"
    with TraceWriter(folder, {"model": "micro:llama"}) as writer:
        for step in (0, 1):
            writer.add(call_at(2 * step, "a", step), {"output": torch.arange(8.0) + step})
            writer.flush()
        writer.attach("noise", {"a": torch.tensor([1.0, 2.0])})
        writer.attach_json("tokens", [[1, 2], [3]])
    return folder
