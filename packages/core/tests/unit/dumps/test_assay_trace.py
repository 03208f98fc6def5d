"""Traces, goldens and folders of checks as dumps."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import assay
from assay.dumps.protocol import Dump, DumpError
from assay.dumps.recognizing import open_dump
from assay.files import UnreadableFileError
from assay.sites import Call, CallSite, RowMap
from assay.trace import TraceWriter

ROWS = RowMap((0, 1), ((0, 1), (-1, 0)))


def call(order: int, module: str, caller: str | None, **fields: Any) -> Call:
    place = {
        name: fields.pop(name)
        for name in ("step", "phase", "micro_batch", "rank")
        if name in fields
    }
    site = CallSite(place.pop("step", 0), module, **place)
    return Call(site, class_name="Linear", caller=caller, order=order, **fields)


def record(folder: Path, *calls: Call, **manifest: Any) -> Path:
    """Record calls. The output of each is its order."""
    with TraceWriter(folder, manifest) as writer:
        for one in calls:
            writer.add(one, {"output": torch.tensor([float(one.order)])})
    return folder


def addresses(dump: Dump) -> list[str]:
    return [str(one.site) for one in dump.tensors]


def values(dump: Dump) -> list[object]:
    return [one.read().tolist() for one in dump.tensors]


def test_calls_are_listed_as_they_ended(tmp_path: Path) -> None:
    """The model calls a, which calls a.b; then it calls c."""
    calls = [call(0, "", None), call(1, "a", ""), call(2, "a.b", "a"), call(3, "c", "")]
    dump = open_dump(record(tmp_path, *calls))
    assert dump.format == "assay"
    assert [one.site.at.module for one in dump.tensors] == ["a.b", "a", "c", ""]
    assert values(dump) == [[2.0], [1.0], [3.0], [0.0]]
    assert [one.order for one in dump.tensors] == [0, 1, 2, 3]


def test_passes_keep_their_order(tmp_path: Path) -> None:
    places = [(batch, step) for batch in (0, 1) for step in (0, 1)]
    calls = []
    for number, (batch, step) in enumerate(places):
        calls.append(call(2 * number, "", None, micro_batch=batch, step=step))
        calls.append(call(2 * number + 1, "a", "", micro_batch=batch, step=step))
    dump = open_dump(record(tmp_path, *calls))
    assert values(dump) == [[1.0], [0.0], [3.0], [2.0], [5.0], [4.0], [7.0], [6.0]]


def test_backward_follows_its_forward_in_opposite_order(tmp_path: Path) -> None:
    forward = [call(0, "", None), call(1, "a", ""), call(2, "b", "")]
    backward = [
        call(n, m, c, phase="backward") for n, m, c in ((0, "", None), (1, "a", ""), (2, "b", ""))
    ]
    dump = open_dump(record(tmp_path, *forward, *backward))
    found = [(one.site.at.module, one.site.at.phase) for one in dump.tensors]
    assert found == [
        ("a", "forward"), ("b", "forward"), ("", "forward"),
        ("b", "backward"), ("a", "backward"), ("", "backward"),
    ]  # fmt: skip


def test_rows_ranks_and_placements_are_kept(tmp_path: Path) -> None:
    sharded = call(0, "a", None, rank=1, rows=ROWS, placements={"output": "b h[tp]"})
    dump = open_dump(record(tmp_path, sharded, call(1, "b", None)))
    first, second = dump.tensors
    assert (first.site.at.rank, first.layout, second.layout) == (1, "b h[tp]", "")
    assert first.rows == ROWS


def test_dtype_shape_and_class_are_known_before_reading(tmp_path: Path) -> None:
    (only,) = open_dump(record(tmp_path, call(0, "a", None))).tensors
    assert (only.dtype, only.shape, only.class_name) == ("float32", (1,), "Linear")


def test_trace_of_statistics_has_no_values(tmp_path: Path) -> None:
    """The input is (3, 4), with norm 5. The layer halves it."""
    layer = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(2) / 2)
    with assay.capture(layer, tmp_path, stats_only=True):
        layer(torch.tensor([[3.0, 4.0]]))
    dump = open_dump(tmp_path)
    assert addresses(dump) == [
        "(model):input.input forward step 0",
        "(model):output forward step 0",
    ]
    assert [one.has_values for one in dump.tensors] == [False, False]
    expected = {"min": 3.0, "max": 4.0, "mean": 3.5, "norm": 5.0}
    assert dump.tensors[0].statistics.items() >= expected.items()
    expected = {"min": 1.5, "max": 2.0, "mean": 1.75, "norm": 2.5}
    assert dump.tensors[1].statistics.items() >= expected.items()


def golden(folder: Path, *dtypes: str) -> Path:
    """Write a golden: a trace for each dtype, whose one value is the position of the dtype."""
    for number, dtype in enumerate(dtypes):
        record(folder / dtype, call(number, "a", None), model="micro:llama", dtype=dtype)
    sections = {dtype: {"yardstick_dtype": "float64"} for dtype in dtypes}
    manifest = {"reference": {"run": "cpu/float32"}, "sections": sections}
    (folder / "golden.json").write_text(json.dumps(manifest))
    return folder


def test_widest_trace_of_a_golden_is_read(tmp_path: Path) -> None:
    dump = open_dump(golden(tmp_path, "bfloat16", "float16"))
    assert values(dump) == [[1.0]]
    assert dict(dump.provenance) == {
        "model": "micro:llama",
        "inputs": "those of every module are rounded to float16",
        "reference": "cpu/float32",
        "yardstick": "float64",
        "trace": "float16; not read: bfloat16",
    }


def test_one_trace_of_a_golden_can_be_named(tmp_path: Path) -> None:
    dump = open_dump(golden(tmp_path, "bfloat16", "float16") / "bfloat16")
    assert values(dump) == [[0.0]]
    assert dump.provenance["yardstick"] == "float64"


def test_folder_of_a_check_offers_its_golden(tmp_path: Path) -> None:
    golden(tmp_path / "golden", "bfloat16")
    assert len(open_dump(tmp_path).tensors) == 1


def write_training(folder: Path, table: Any) -> Path:
    """Write the trace of a training golden: one call, and the values of two steps."""
    with TraceWriter(folder / "trace", {"dtype": "bfloat16", "kind": "training"}) as writer:
        for step in (0, 1):
            for phase in ("forward", "backward"):
                one = call(step, "a", None, step=step, phase=phase)
                writer.add(one, {"output": torch.tensor([float(step)])})
            tensors = {"0": torch.tensor([10.0 + step]), "1": torch.tensor([20.0 + step])}
            writer.attach(f"step-{step}", tensors)
            writer.attach_json(f"step-{step}-table", table)
    report = {"reference": {"run": "cpu/float32", "yardstick": "float64"}}
    (folder / "report.json").write_text(json.dumps(report))
    return folder


def row(phase: str, module: str, port: str, index: int, tensor: int) -> dict[str, object]:
    return {"phase": phase, "module": module, "port": port, "index": index, "tensor": tensor}


def test_values_between_the_phases_of_a_step_are_read(tmp_path: Path) -> None:
    loss, gradient = row("forward", "", "loss", 1, 0), row("backward", "a", "gradient.weight", 0, 1)
    reduced = row("reduce", "a", "gradient.weight", 0, 1)
    table = {"values": [loss, gradient, reduced], "states": []}
    dump = open_dump(write_training(tmp_path, table))
    of_step_0 = [
        "a:output forward step 0",
        "a:output backward step 0",
        "(model):loss forward step 0 micro-batch 1",
        "a:parameter.weight backward step 0",
        "a:parameter.weight reduce step 0",
    ]
    assert addresses(dump) == [*of_step_0, *(one.replace("step 0", "step 1") for one in of_step_0)]
    assert values(dump)[5:] == [[1.0], [1.0], [11.0], [21.0], [21.0]]
    assert dump.provenance["yardstick"] == "float64"


@pytest.mark.parametrize(
    "table",
    [
        [],
        {"values": 1},
        {"values": [{}]},
        {"values": [row("sideways", "a", "loss", 0, 0)]},
        {"values": [row("forward", "a", "loss", 0, 5)]},
        {"values": [row("forward", "a", 3, 0, 0)]},  # type: ignore[arg-type]
    ],
)
def test_damaged_table_of_a_step_is_one_error(tmp_path: Path, table: object) -> None:
    with pytest.raises(DumpError, match="step-0-table"):
        open_dump(write_training(tmp_path, table))


def test_run_that_was_cut_off_is_a_problem(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, {})
    writer.add(call(0, "a", None), {"output": torch.tensor([1.0])})
    writer.flush()
    dump = open_dump(tmp_path)
    assert values(dump) == [[1.0]]
    assert list(dump.problems) == [f"{tmp_path}: the run was cut off, its last calls are missing"]
    writer.close()


def test_a_run_that_ended_before_its_first_call_is_reported_as_cut_off(tmp_path: Path) -> None:
    TraceWriter(tmp_path / "t", {})
    with pytest.raises(DumpError, match="the run was cut off before its first call was written"):
        open_dump(tmp_path / "t")


def test_trace_without_calls_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DumpError, match="holds no recorded module calls: capture with --level module"
    ):
        open_dump(record(tmp_path))


def set_index(folder: Path, change: Callable[[str], str]) -> None:
    file = folder / "index.jsonl"
    file.write_text(change(file.read_text()))


def complete_by_hand(folder: Path) -> None:
    file = folder / "manifest.json"
    file.write_text(
        file.read_text().replace('"complete":false,"lines":null', '"complete":true,"lines":1')
    )


def test_a_trace_with_another_index_is_refused(tmp_path: Path) -> None:
    """Without a call in EXPECTED, a comparison would not miss it in ACTUAL."""
    folder = record(tmp_path / "t", call(0, "a", None), call(1, "b", None))
    set_index(folder, lambda text: text.replace('"module":"b"', '"module":"c"'))
    with pytest.raises(
        DumpError, match=r"t changed since its capture.*\n.*index.jsonl: the list of"
    ):
        open_dump(folder)


def test_a_trace_that_was_completed_by_hand_is_refused(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", {})
    writer.add(call(0, "a", None), {"output": torch.tensor([1.0])})
    writer.flush()
    complete_by_hand(tmp_path / "t")
    with pytest.raises(
        DumpError, match=r"changed since its capture.*\n.*manifest.json: its values"
    ):
        open_dump(tmp_path / "t")


def test_another_table_of_a_step_is_refused(tmp_path: Path) -> None:
    table = {"values": [row("forward", "", "loss", 0, 0), row("forward", "a", "loss", 0, 1)]}
    folder = write_training(tmp_path, table)
    file = folder / "trace/attachments/step-0-table.json"
    file.write_text(file.read_text().replace('"index":0', '"index":1'))
    with pytest.raises(DumpError, match="step-0-table: the list of its values"):
        open_dump(folder)


def test_a_rank_that_changed_is_a_problem_of_all_ranks(tmp_path: Path) -> None:
    for rank in (0, 1):
        record(tmp_path / f"rank-{rank}", call(0, "a", None, rank=rank))
    set_index(tmp_path / "rank-1", lambda text: text.replace('"a"', '"b"'))
    (problem,) = open_dump(tmp_path).problems
    assert problem.startswith(f"rank 1: {tmp_path / 'rank-1'} changed since its capture")


def write_shards(folder: Path) -> Path:
    """Write three calls, each in a shard of its own."""
    with TraceWriter(folder, {}) as writer:
        for number, name in enumerate("abc"):
            values = {"input.0": torch.arange(100.0), "output": torch.full((9,), -1.0 - number)}
            writer.add(call(number, name, None), values)
            writer.flush()
    return folder


@pytest.mark.parametrize("kept", [None, 10])
def test_a_lost_shard_loses_its_own_tensors(tmp_path: Path, kept: int | None) -> None:
    """The inputs are equal, and so are stored once, in the first shard."""
    folder = write_shards(tmp_path / "t")
    shard = folder / "shard-000001.safetensors"
    shard.unlink() if kept is None else os.truncate(shard, kept)
    dump = open_dump(folder)
    assert addresses(dump) == [
        f"{name}:{port} forward step 0"
        for name in "abc"
        for port in ("input.0", "output")
        if (name, port) != ("b", "output")
    ]
    lost = "b:output forward step 0"
    assert dump.problems == [f"t/shard-000001.safetensors is missing or cut off; lost: {lost}"]


def test_a_shard_without_its_end_keeps_its_first_tensors(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "t")
    shard = folder / "shard-000000.safetensors"
    os.truncate(shard, shard.stat().st_size - 4)
    dump = open_dump(folder)
    lost = "a:output forward step 0"
    assert dump.problems == [f"t/shard-000000.safetensors is missing or cut off; lost: {lost}"]
    assert len(addresses(dump)) == 5
    assert values(dump)[0] == list(range(100))


def test_lost_values_of_a_step_are_named_by_their_file(tmp_path: Path) -> None:
    folder = write_training(tmp_path, {"values": [row("forward", "", "loss", 0, 0)]})
    (folder / "trace/attachments/step-1.safetensors").unlink()
    dump = open_dump(folder)
    assert [one for one in addresses(dump) if "loss" in one] == ["(model):loss forward step 0"]
    assert dump.problems == ["trace/attachments/step-1.safetensors is missing or cut off"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "manifest.json").write_text('{"format":"assay-trace","schema":2'),
        lambda folder: (folder / "index.jsonl").unlink(),
        lambda folder: (folder / "index.jsonl").write_text("{}\n" * 2),
        lambda folder: set_index(folder, lambda text: text.replace("[1]", f"[1{'0' * 400}]")),
        lambda folder: (folder / "shard-000000.safetensors").unlink(),
    ],
)
def test_damaged_trace_is_one_error(tmp_path: Path, damage: Any) -> None:
    record(tmp_path, call(0, "a", None))
    damage(tmp_path)
    with pytest.raises((DumpError, UnreadableFileError)) as raised:
        open_dump(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_shard_that_changes_after_opening_is_one_error(tmp_path: Path) -> None:
    dump = open_dump(record(tmp_path, call(0, "a", None)))
    shard = tmp_path / "shard-000000.safetensors"
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(UnreadableFileError, match="shard-000000"):
        dump.tensors[0].read()


@pytest.mark.parametrize("kind", ["values", "parameters"])
def test_a_flipped_bit_is_named_with_its_place(tmp_path: Path, kind: str) -> None:
    layer = nn.Linear(64, 64)
    with torch.no_grad(), assay.capture(layer, tmp_path, weights=True):
        layer(torch.ones(2, 64))
    pattern = "shard-*.safetensors" if kind == "values" else "attachments/step-0.safetensors"
    (file,) = tmp_path.glob(pattern)
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    dump = open_dump(tmp_path)
    damaged = [one for one in dump.tensors if one.read_intact() is None]
    assert damaged
    assert all(one.site.port.startswith("parameter") for one in damaged) == (kind == "parameters")
    for one in damaged:
        with pytest.raises(UnreadableFileError, match=re.escape(str(one.site))):
            one.read()
