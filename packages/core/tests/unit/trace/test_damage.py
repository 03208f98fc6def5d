"""Bits that flip while a trace is copied."""

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.errors import UsageError
from assay.sites import Call
from assay.trace import Trace, TraceError, TraceWriter
from assay.trace.files import Folder
from assay.trace.layout import ShardReader
from packages.core.tests.unit.trace.conftest import CallAt

SHARD = "shard-000001.safetensors"


def set_line(folder: Path, number: int, change: Callable[[dict[str, Any]], object]) -> None:
    lines = [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]
    change(lines[number])
    (folder / "index.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def set_header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Another header of the same length, so that the size of the file stays."""
    content = (folder / SHARD).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    (folder / SHARD).write_bytes(content[:8] + text.ljust(length) + content[8 + length :])


def test_rewritten_json_with_the_same_content_is_not_damaged(two_steps: Path) -> None:
    set_header(two_steps, lambda _: None)
    set_line(two_steps, 1, lambda _: None)
    trace = Trace.open(two_steps)
    values = [trace.tensor(call, "output")[0].item() for call in trace.calls]
    assert (values, trace.complete) == ([0.0, 1.0], True)


@pytest.mark.parametrize("kept", [0, 5, 8, 60, 65_567])
def test_truncated_shard_is_named_with_its_key(two_steps: Path, kept: int) -> None:
    size = (two_steps / SHARD).stat().st_size
    os.truncate(two_steps / SHARD, kept)
    message = rf"{SHARD}: '2:output': the file has {kept} bytes, the index says {size}"
    with pytest.raises(UsageError, match=message):
        Trace.open(two_steps)


def test_missing_shard_is_named_with_its_key(two_steps: Path) -> None:
    (two_steps / SHARD).unlink()
    with pytest.raises(TraceError, match=rf"{SHARD}: the file is missing.*'2:output'"):
        Trace.open(two_steps)


def test_shard_that_shrinks_while_the_trace_is_open_is_an_error(two_steps: Path) -> None:
    trace = Trace.open(two_steps)
    trace.tensor(trace.calls[1], "output")
    os.truncate(two_steps / SHARD, 100)
    with pytest.raises(TraceError, match=rf"{SHARD}: mapping failed"):
        trace.tensor(trace.calls[1], "output")


def test_shard_behind_a_link_out_of_the_folder_is_refused(two_steps: Path, tmp_path: Path) -> None:
    (two_steps / SHARD).rename(tmp_path / "elsewhere")
    (two_steps / SHARD).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TraceError, match=rf"{SHARD}: the file lies outside of the trace"):
        Trace.open(two_steps)


def test_link_to_itself_is_refused(two_steps: Path) -> None:
    (two_steps / SHARD).unlink()
    (two_steps / SHARD).symlink_to(SHARD)
    with pytest.raises(TraceError, match=rf"{SHARD}: the file is missing"):
        Trace.open(two_steps)


def test_folder_in_place_of_a_shard_is_refused(two_steps: Path) -> None:
    (two_steps / SHARD).unlink()
    (two_steps / SHARD).mkdir()
    with pytest.raises(TraceError, match=rf"{SHARD}: not a file"):
        Trace.open(two_steps)


def test_attachment_that_leaves_the_folder_is_refused(two_steps: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("1")
    set_line(two_steps, 3, lambda line: line.update(attached="../../secret", size=1))
    with pytest.raises(TraceError, match=r"secret\.json: the file lies outside of the trace"):
        Trace.open(two_steps)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h["2:output"].update(dtype="I32"), "int32 [8], the index says float32 [8]"),
        (lambda h: h["2:output"].update(shape=[2, 4]), "float32 [2, 4], the index says float32 [8]"),
        (lambda h: h.update({"other": h.pop("2:output")}), "the shard has no such key"),
        (lambda h: h["2:output"].update(shape=[9]), "32 bytes for 9 values of F32"),
        (lambda h: h["2:output"].update(shape=[-2, -4]), "-2 is neither a size nor an offset"),
        (lambda h: h["2:output"].update(shape=[8.0]), "8.0 is neither a size nor an offset"),
        (lambda h: h["2:output"].update(dtype="F31"), "'F31'"),
        (lambda h: h["2:output"].update(dtype=[1]), "[1]"),
        (lambda h: h["2:output"].update(data_offsets=[32, 64]), "ends at byte"),
        (lambda h: h["2:output"].update(data_offsets=[0, 1 << 60], shape=[1 << 58]), "ends at byte"),
        (lambda h: h["2:output"].update(data_offsets=[0]), "not enough values"),
        (lambda h: h["2:output"].pop("shape"), "'shape'"),
        (lambda h: h.update({"2:output": 3}), "not subscriptable"),
        (
            lambda h: h.update(__metadata__={"torch_dtypes": '{"2:output":"complex128"}'}),
            "no bytes of complex128",
        ),
        (
            lambda h: h.update(__metadata__={"torch_dtypes": '{"2:output":"nn"}'}),
            "unknown dtype 'nn'",
        ),
    ],
)  # fmt: skip
def test_inconsistent_header_is_reported_with_its_key(
    two_steps: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    set_header(two_steps, change)
    trace = Trace.open(two_steps)
    with pytest.raises(UsageError, match=rf"{SHARD}.* '?2:output'?.*{re.escape(message)}"):
        trace.tensor(trace.calls[1], "output")


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ((1 << 62).to_bytes(8, "little"), "its header is cut off"),
        (bytes(8), "header: not JSON"),
        (b"\x02" + bytes(7) + b"[]", "broken safetensors header"),
        (b"\x04" + bytes(7) + b"null", "broken safetensors header"),
        (b"\x02" + bytes(7) + b"\xff\xff", "header is not UTF-8"),
        ((4000).to_bytes(8, "little") + b"[" * 4000, "header: not JSON: nested deeper"),
        (b"\x14" + bytes(7) + b'{"__metadata__":"a"}', "broken safetensors header"),
        (b"\x24" + bytes(7) + b'{"__metadata__":{"torch_dtypes":[]}}', "no safetensors header"),
    ],
    ids=["10 EB", "empty", "list", "null", "not UTF-8", "deep", "metadata", "dtypes"],
)
def test_hostile_header_is_one_clear_error(two_steps: Path, start: bytes, message: str) -> None:
    content = (two_steps / SHARD).read_bytes()
    (two_steps / SHARD).write_bytes(start + content[len(start) :])
    trace = Trace.open(two_steps)
    with pytest.raises(TraceError, match=rf"{SHARD}.* {message}"):
        trace.tensor(trace.calls[1], "output")


def test_header_over_the_limit_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "x.safetensors").open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)  # takes no room on the disk
    with pytest.raises(TraceError, match="its header is cut off"):
        ShardReader(Folder(tmp_path), "x.safetensors")


def test_tensor_at_an_odd_offset_is_read(tmp_path: Path) -> None:
    header = b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    header += b" " * (1 - len(header) % 2)
    content = len(header).to_bytes(8, "little") + header + struct.pack("<2f", 1.5, -2.0)
    (tmp_path / "x.safetensors").write_bytes(content)
    assert len(header) % 2 == 1
    assert ShardReader(Folder(tmp_path), "x.safetensors").tensor("x").tolist() == [1.5, -2.0]


def set_port(place: int, value: object) -> Callable[[dict[str, Any]], object]:
    def change(line: dict[str, Any]) -> None:
        line["calls"][0]["ports"]["output"][place] = value

    return change


def set_call(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda line: line["calls"][0].update({name: value})


@pytest.mark.parametrize(
    "change",
    [
        set_port(0, -1), set_port(0, "../../etc/passwd"), set_port(1, 5), set_port(3, "float31"),
        set_port(3, "nn"), set_port(3, []), set_port(4, [-8]), set_port(4, 8), set_port(4, [True]),
        set_call("order", "0"), set_call("phase", "sideways"), set_call("phase", []),
        set_call("module", None), set_call("rows", 5), set_call("rows", -1), set_call("ports", []),
        set_call("constants", 1), set_call("placements", [1]), set_call("rank", -1),
        lambda line: line["calls"][0].pop("class"),
        lambda line: line.pop("calls"),
        lambda line: line.update(calls=3),
        lambda line: line.update(shards=[[0]]),
        lambda line: line.update(rows=[{"prompts": [0], "positions": [["x"]]}]),
        lambda line: line.update(attached="a", kind="pickle", size=1),
        lambda line: line.update(attached="a", kind="json", size=-1),
    ],
)  # fmt: skip
def test_invalid_line_is_reported(
    two_steps: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    set_line(two_steps, 1, change)
    with pytest.raises(TraceError, match=r"index\.jsonl: 'line 2': "):
        Trace.open(two_steps)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\xff", "[" * 100_000])
def test_line_without_an_object_is_reported(two_steps: Path, text: str) -> None:
    lines = (two_steps / "index.jsonl").read_bytes().splitlines()
    lines[1] = text.encode("latin-1")
    (two_steps / "index.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(TraceError, match=r"index\.jsonl: 'line 2': "):
        Trace.open(two_steps)


def test_shard_that_no_line_lists_is_refused(two_steps: Path) -> None:
    set_line(two_steps, 1, set_port(0, 9))
    with pytest.raises(TraceError, match=r"shard-000009\.safetensors: '2:output': the index does"):
        Trace.open(two_steps)


def test_call_in_two_lines_is_refused(two_steps: Path) -> None:
    set_line(two_steps, 1, set_call("step", 0))
    with pytest.raises(TraceError, match=r"index\.jsonl: .*module='a'.*: indexed twice"):
        Trace.open(two_steps)


def test_complete_trace_that_lost_lines_is_refused(two_steps: Path) -> None:
    lines = (two_steps / "index.jsonl").read_bytes().splitlines(keepends=True)
    (two_steps / "index.jsonl").write_bytes(b"".join(lines[:-1]))
    with pytest.raises(TraceError, match=r"index\.jsonl: 3 lines, the manifest says 4"):
        Trace.open(two_steps)
    (two_steps / "index.jsonl").unlink()
    with pytest.raises(TraceError, match=r"index\.jsonl: the file is missing"):
        Trace.open(two_steps)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("format", '"other"', "is not a trace: manifest.json does not have format 'assay-trace'"),
        ("schema", "1", "manifest.json: schema 1, this version of assay reads 2: capture"),
        ("schema", "null", "manifest.json: schema None, this version"),
        ("complete", '"yes"', "manifest.json: 'manifest': the fields of a manifest are missing"),
        ("manifest", "[]", "manifest.json: 'manifest': the fields of a manifest are missing"),
    ],
)
def test_foreign_manifest_is_refused(two_steps: Path, name: str, text: str, message: str) -> None:
    content = json.loads((two_steps / "manifest.json").read_text())
    content[name] = json.loads(text)
    (two_steps / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(TraceError, match=re.escape(message)):
        Trace.open(two_steps)


def test_other_folders_are_refused(two_steps: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"absent is not a trace: there is no such folder"):
        Trace.open(tmp_path / "absent")
    with pytest.raises(TraceError, match=r"manifest\.json is not a trace: there is no such folder"):
        Trace.open(two_steps / "manifest.json")
    (two_steps / "manifest.json").write_text("{")
    with pytest.raises(TraceError, match=r"manifest\.json: not JSON"):
        Trace.open(two_steps)
    (two_steps / "manifest.json").unlink()
    with pytest.raises(TraceError, match=r"is not a trace: it has no manifest\.json$"):
        Trace.open(two_steps)


def test_a_folder_of_traces_is_refused_with_their_names(two_steps: Path) -> None:
    golden = two_steps.parent / "golden"
    golden.mkdir()
    for name in ("float16", "bfloat16"):
        (golden / name).symlink_to(two_steps)
    with pytest.raises(TraceError) as raised:
        Trace.open(golden)
    assert str(raised.value) == (
        f"{golden} is not a trace: it has no manifest.json; these of its folders are traces: bfloat16, float16"
    )


def test_damaged_attachment_is_named(two_steps: Path) -> None:
    file = two_steps / "attachments/tokens.json"
    file.write_text("[" * file.stat().st_size)
    with pytest.raises(TraceError, match=r"tokens\.json: 'tokens': not JSON"):
        Trace.open(two_steps).attachment_json("tokens")
    file.write_text("[]")
    with pytest.raises(TraceError, match=r"tokens\.json: 'tokens': the file has 2 bytes"):
        Trace.open(two_steps)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_reading_needs_memory_for_one_tensor_not_for_the_trace(
    tmp_path: Path, call_at: Callable[..., Call]
) -> None:
    size, num_shards = 4 << 20, 40
    with TraceWriter(tmp_path / "t", {}) as writer:
        for step in range(num_shards):
            values = torch.full((size // 4,), float(step))
            writer.add(call_at(step, "m", step), {"output": values})
            writer.flush()
    trace = Trace.open(tmp_path / "t")

    before, largest = resident_bytes(), 0
    for step, call in enumerate(trace.calls):
        tensor = trace.tensor(call, "output")
        assert tensor.max().item() == step
        largest = max(largest, resident_bytes())
        del tensor

    # Of the 160 MB, one tensor at a time and the headers.
    assert largest - before < 6 * size


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
