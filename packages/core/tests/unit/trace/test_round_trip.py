import json
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.sites import Call, CallSite, RowMap, Site
from assay.trace import Trace, TraceWriter

DTYPES = [
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu", "complex64", "complex128", "complex32", "int64", "int32",
    "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
]  # fmt: skip


def bits(tensor: torch.Tensor) -> list[int]:
    return list(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("offset", [0, 3], ids=["aligned", "after an odd size"])
def test_every_bit_of_every_dtype_survives(
    tmp_path: Path, call_at: Callable[..., Call], name: str, offset: int
) -> None:
    dtype = getattr(torch, name)
    # All 256 byte values: NaNs with payloads, denormals, infinities, negative zeros among them.
    pattern = [byte % 2 if name == "bool" else byte for byte in range(256)]
    expected = torch.tensor(pattern, dtype=torch.uint8).view(dtype).reshape(2, -1)
    before = torch.zeros(offset, dtype=torch.uint8)
    with TraceWriter(tmp_path / "t", {}) as writer:
        writer.add(call_at(0), {"before": before, "output": expected})

    actual = Trace.open(tmp_path / "t").tensor(call_at(0), "output")

    assert (actual.dtype, actual.shape) == (dtype, expected.shape)
    assert bits(actual) == pattern


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(3.0).expand(4, 3),
        torch.tensor(2.5).expand(1, 1),
        torch.arange(10.0)[3:7],
        torch.tensor(2.5),
        torch.empty(0, 4),
        torch.empty(2, 0, dtype=torch.bool),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        torch._neg_view(torch.arange(3.0)),
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(3)),
    ],
    ids=["transposed", "expanded", "one expanded", "sliced", "0-d", "empty", "empty bool", "conjugate",
         "conjugate's part", "negated", "with gradient", "parameter"],
)  # fmt: skip
def test_any_layout_is_read_back_as_its_values(
    tmp_path: Path, call_at: Callable[..., Call], tensor: torch.Tensor
) -> None:
    with TraceWriter(tmp_path / "t", {}) as writer:
        writer.add(call_at(0), {"output": tensor})

    actual = Trace.open(tmp_path / "t").tensor(call_at(0), "output")

    assert actual.shape == tensor.shape
    assert actual.tolist() == tensor.tolist()
    assert not actual.requires_grad


def test_tensors_made_in_inference_mode_are_recorded(
    tmp_path: Path, call_at: Callable[..., Call]
) -> None:
    with TraceWriter(tmp_path / "t", {}) as writer, torch.inference_mode():
        writer.add(call_at(0), {"output": torch.ones(2)})
    assert Trace.open(tmp_path / "t").tensor(call_at(0), "output").tolist() == [1, 1]


def test_call_is_read_back_unchanged(tmp_path: Path) -> None:
    rows = RowMap(prompts=(4, 7), positions=((-1, 0, 1), (0, 1, 2)))
    given_call = Call(
        CallSite(3, "model.layers.0", call=2, phase="backward", micro_batch=1, rank=5),
        class_name="LlamaDecoderLayer",
        caller="model",
        order=17,
        rows=rows,
        constants={
            "input.use_cache": True,
            "input.scale": float("-inf"),
            "input.window": None,
            "input.sizes": (1, 2),
            "input.name": "é",
        },
        placements={"output": "shard(0)"},
    )
    with TraceWriter(tmp_path / "t", {"seed": 0, "limit": float("inf")}) as writer:
        writer.add(given_call, {"input.0": torch.ones(1), "output": torch.zeros(1)})

    trace = Trace.open(tmp_path / "t")
    (call,) = trace.calls

    assert trace.manifest == {"seed": 0, "limit": float("inf")}
    assert call.site == given_call.site
    assert (call.class_name, call.caller, call.order) == ("LlamaDecoderLayer", "model", 17)
    assert call.rows == rows
    assert call.ports == ("input.0", "output")
    assert call.placements == {"output": "shard(0)"}
    assert call.constants == {
        "input.use_cache": True,
        "input.scale": float("-inf"),
        "input.window": None,
        "input.sizes": [1, 2],
        "input.name": "é",
    }


def test_calls_come_in_order_of_their_start(tmp_path: Path, call_at: Callable[..., Call]) -> None:
    with TraceWriter(tmp_path / "t", {}) as writer:
        # A child finishes before the module that called it.
        for step in (0, 1):
            writer.add(call_at(2 * step + 1, "model.child", step, caller=""), {})
            writer.add(call_at(2 * step, "", step), {"output": torch.ones(step + 1)})
            writer.flush()

    trace = Trace.open(tmp_path / "t")

    assert [(call.site.step, call.site.module) for call in trace.calls] == [
        (0, ""), (0, "model.child"), (1, ""), (1, "model.child"),
    ]  # fmt: skip
    assert trace.modules == ("", "model.child")
    assert trace.find(CallSite(1, "")) == trace.calls[2]
    assert trace.find(CallSite(2, "")) is None
    assert list(trace.sites()) == [
        Site(CallSite(0, ""), "output"),
        Site(CallSite(1, ""), "output"),
    ]


def test_row_maps_are_written_once_for_each_flush(
    tmp_path: Path, call_at: Callable[..., Call]
) -> None:
    first = RowMap((0,), ((0, 1),))
    equal = RowMap((0,), ((0, 1),))
    other = RowMap((1,), ((0, 1),))
    with TraceWriter(tmp_path / "t", {}) as writer:
        for order, rows in enumerate([first, first, equal, other]):
            writer.add(call_at(order, f"m{order}", rows=rows), {})

    (line,) = (tmp_path / "t/index.jsonl").read_text().splitlines()
    assert len(json.loads(line)["rows"]) == 2
    assert [call.rows for call in Trace.open(tmp_path / "t").calls] == [first, first, first, other]


def test_digest_is_the_xxh3_128_of_the_bytes(tmp_path: Path, call_at: Callable[..., Call]) -> None:
    with TraceWriter(tmp_path / "t", {}) as writer:
        writer.add(call_at(0), {"output": torch.empty(0, 3)})
    # Of the empty input, as xxHash publishes it.
    digest = Trace.open(tmp_path / "t").stored(call_at(0), "output").digest
    assert digest == "99aa06d3014798d86001c324468d497f"


tensors = st.builds(
    lambda dtype, shape, byte: torch.full(
        (*shape, dtype.itemsize), byte, dtype=torch.uint8
    ).view(dtype).squeeze(-1),
    st.sampled_from([getattr(torch, name) for name in DTYPES if name != "bool"]),
    st.lists(st.integers(0, 3), max_size=4),
    st.integers(0, 255),
)  # fmt: skip


@given(st.lists(st.dictionaries(st.text(min_size=1, max_size=8), tensors, max_size=4), max_size=4))
@settings(deadline=None, max_examples=40)
def test_any_sequence_of_calls_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, calls: list[dict[str, torch.Tensor]]
) -> None:
    folder = tmp_path_factory.mktemp("trace") / "t"
    with warnings.catch_warnings():
        # torch warns that few operators support complex32; none is used.
        warnings.simplefilter("ignore", UserWarning)
        with TraceWriter(folder, {}, shard_bytes=64) as writer:
            for order, ports in enumerate(calls):
                writer.add(Call(CallSite(order, "m"), "Linear", None, order), ports)
        trace = Trace.open(folder)
        assert len(trace.calls) == len(calls)
        for call, ports in zip(trace.calls, calls, strict=True):
            assert set(call.ports) == set(ports)
            for port, expected in ports.items():
                actual = trace.tensor(call, port)
                assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
                assert bits(actual) == bits(expected)


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
