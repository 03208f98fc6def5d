"""Bits that flip while a trace is copied."""

from pathlib import Path

import pytest
import torch

from assay.trace import Trace, TraceError, TraceWriter
from packages.core.tests.unit.trace.conftest import CallAt


@pytest.fixture
def trace_folder(tmp_path: Path, call_at: CallAt) -> Path:
    folder = tmp_path / "trace"
    with TraceWriter(folder, {"model": "micro:llama", "loss": float("nan")}) as writer:
        for step in (0, 1):
            values = torch.arange(5.0) + step
            writer.add(call_at(2 * step, "a", step), {"output": values, "input.x": values * 2})
            writer.flush()
        writer.attach("noise", {"a": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)})
        writer.attach_json("tokens", [[1, 2], [3]])
    return folder


def flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 4
    file.write_bytes(data)


def is_found(folder: Path, file: Path) -> bool:
    try:
        damage = Trace.open(folder).find_damage()
    except TraceError:  # such as a file that the index gives another size than it has
        return True
    return any(line.startswith(str(file.relative_to(folder))) for line in damage)


def all_that_is_read(folder: Path) -> str:
    trace = Trace.open(folder)
    tensors = [trace.tensor(call, port).tolist() for call in trace.calls for port in call.ports]
    noise = {key: tensor.tolist() for key, tensor in trace.attachment("noise").items()}
    return repr((trace.manifest, trace.calls, tensors, noise, trace.attachment_json("tokens")))


def test_intact_trace_has_no_damage(trace_folder: Path) -> None:
    assert Trace.open(trace_folder).find_damage() == []


def test_damaged_value_is_named_with_file_and_port(trace_folder: Path) -> None:
    shard = trace_folder / "shard-000001.safetensors"
    flip(shard, shard.stat().st_size - 3)  # in the last tensor
    assert Trace.open(trace_folder).find_damage() == [
        "shard-000001.safetensors: the values of a:input.x forward step 1"
    ]


@pytest.mark.parametrize(
    "name",
    ["manifest.json", "index.jsonl", "attachments/tokens.json", "attachments/noise.safetensors",
     "shard-000000.safetensors"],
)  # fmt: skip
def test_flipped_bit_that_changes_what_is_read_is_found(trace_folder: Path, name: str) -> None:
    file = trace_folder / name
    intact = file.read_bytes()
    expected = all_that_is_read(trace_folder)
    missed, num_found = [], 0
    for position in range(0, len(intact), max(1, len(intact) // 97)):
        flip(file, position)
        if is_found(trace_folder, file):
            num_found += 1
        elif all_that_is_read(trace_folder) != expected:
            missed.append((position, intact[position - 8 : position + 8]))
        file.write_bytes(intact)
    assert missed == []
    assert num_found


def test_damaged_json_and_headers_are_reported(trace_folder: Path) -> None:
    (trace_folder / "attachments/tokens.json").write_bytes(b"\xff" * 11)
    assert Trace.open(trace_folder).find_damage() == [
        "attachments/tokens.json: the values of tokens"
    ]
