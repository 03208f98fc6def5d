import weakref
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch

from assay.sites import Call
from assay.trace import Trace, TraceWriter


def test_identical_tensors_are_stored_once_in_the_whole_trace(
    tmp_path: Path, call_at: Callable[..., Call]
) -> None:
    same = torch.arange(1000.0)
    with TraceWriter(tmp_path / "t", {}) as writer:
        writer.add(call_at(0, "a"), {"output": same})
        writer.add(call_at(1, "b"), {"input.x": same, "output": same.clone()})
        writer.flush()
        writer.add(call_at(2, "c"), {"input.x": same.clone(), "output": same + 1})

    trace = Trace.open(tmp_path / "t")

    assert (trace.modules, len(trace.calls)) == (("a", "b", "c"), 3)
    assert len(list(trace.sites())) == 5
    assert trace.unique_bytes == 8_000
    assert trace.complete
    shards = [file.stat().st_size for file in (tmp_path / "t").glob("shard-*")]
    assert len(shards) == 2
    assert sum(shards) < 8_000 + (1 << 16) + (1 << 13)  # data and the room left for two headers
    assert trace.tensor(trace.calls[2], "input.x").tolist() == same.tolist()


def test_equal_bytes_of_another_dtype_or_shape_are_separate(
    tmp_path: Path, call_at: Callable[..., Call]
) -> None:
    zeros = torch.zeros(6)
    with TraceWriter(tmp_path / "t", {}) as writer:
        ports = {"a": zeros, "b": zeros.int(), "c": zeros.reshape(2, 3)}
        writer.add(call_at(0), ports)
    trace = Trace.open(tmp_path / "t")
    assert {port: trace.tensor(call_at(0), port).dtype for port in "abc"} == {
        "a": torch.float32, "b": torch.int32, "c": torch.float32,
    }  # fmt: skip
    assert trace.tensor(call_at(0), "c").shape == (2, 3)


def test_changes_of_a_tensor_after_it_was_added_do_not_affect_the_trace(
    tmp_path: Path, call_at: Callable[..., Call]
) -> None:
    declared, undeclared = torch.ones(3), torch.full((3,), 2.0)
    with TraceWriter(tmp_path / "t", {}) as writer:
        writer.add(call_at(0, "a"), {"x": declared, "y": undeclared})
        declared.add_(5)
        undeclared.data.add_(5)  # leaves the version counter as it was
        writer.add(call_at(1, "b"), {"x": declared, "y": undeclared})
        declared.zero_()

    trace = Trace.open(tmp_path / "t")
    values = [[trace.tensor(call, port)[0].item() for port in "xy"] for call in trace.calls]
    assert values == [[1, 2], [6, 7]]


def test_writer_keeps_no_tensor_alive(tmp_path: Path, call_at: Callable[..., Call]) -> None:
    with TraceWriter(tmp_path / "t", {}) as writer:
        tensor = torch.ones(3)
        alive = weakref.ref(tensor)
        writer.add(call_at(0), {"output": tensor})
        del tensor
        assert alive() is None


def test_read_tensor_can_change_in_place(two_steps: Path) -> None:
    trace = Trace.open(two_steps)
    trace.tensor(trace.calls[0], "output").zero_()
    assert trace.tensor(trace.calls[0], "output").tolist() == list(range(8))


def test_tensors_are_aligned_as_torch_aligns_its_own(
    tmp_path: Path, call_at: Callable[..., Call]
) -> None:
    ports = {f"p{n}": torch.ones(n, dtype=torch.int8) for n in range(1, 9)}
    with TraceWriter(tmp_path / "t", {}) as writer:
        writer.add(call_at(0), ports)
    trace = Trace.open(tmp_path / "t")
    assert [trace.tensor(call_at(0), port).data_ptr() % 64 for port in ports] == [0] * 8


def test_full_header_starts_a_new_shard(tmp_path: Path, call_at: Callable[..., Call]) -> None:
    # About 90 bytes of header each, in the 64 KiB of the first shard.
    ports = {f"p{n}": torch.tensor([n]) for n in range(2000)}
    with TraceWriter(tmp_path / "t", {}) as writer:
        writer.add(call_at(0), ports)

    assert len(list((tmp_path / "t").glob("shard-*"))) > 1
    trace = Trace.open(tmp_path / "t")
    assert [trace.tensor(call_at(0), port).item() for port in ports] == list(range(2000))


def test_header_full_of_other_dtypes_starts_a_new_shard(
    tmp_path: Path, call_at: Callable[..., Call]
) -> None:
    ports = {f"p{n}": torch.tensor([n], dtype=torch.complex128) for n in range(800)}
    with TraceWriter(tmp_path / "t", {}) as writer:
        writer.add(call_at(0), ports)
    trace = Trace.open(tmp_path / "t")
    assert [trace.tensor(call_at(0), port).item() for port in ports] == list(range(800))


def test_names_of_any_length_and_alphabet_fit(tmp_path: Path, call_at: Callable[..., Call]) -> None:
    ports = {"x" * 70_000: torch.ones(1), '"\\é\n': torch.ones(2, dtype=torch.complex128)}
    with TraceWriter(tmp_path / "t", {}) as writer:
        writer.add(call_at(0), ports)
        writer.attach("odd", ports)
    trace = Trace.open(tmp_path / "t")
    assert [trace.tensor(call_at(0), port).numel() for port in ports] == [1, 2]
    assert {key: value.numel() for key, value in trace.attachment("odd").items()} == {
        key: value.numel() for key, value in ports.items()
    }


def test_large_call_is_flushed_at_once(tmp_path: Path, call_at: Callable[..., Call]) -> None:
    with TraceWriter(tmp_path / "t", {}, shard_bytes=4000) as writer:
        writer.add(call_at(0, "a"), {"output": torch.zeros(500)})
        assert Trace.open(tmp_path / "t").calls == ()
        writer.add(call_at(1, "b"), {"output": torch.ones(500)})
        assert len(Trace.open(tmp_path / "t").calls) == 2


def test_empty_flush_writes_nothing(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", {}) as writer:
        writer.flush()
    trace = Trace.open(tmp_path / "t")
    assert trace.complete
    assert trace.calls == ()
    assert sorted(file.name for file in (tmp_path / "t").iterdir()) == [
        "index.jsonl",
        "manifest.json",
    ]


def test_shards_are_plain_safetensors_for_other_readers(two_steps: Path) -> None:
    tensors = safetensors.torch.load_file(two_steps / "shard-000001.safetensors")
    assert tensors["2:output"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
