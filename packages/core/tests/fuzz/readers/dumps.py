"""Readers of dumps that other tools wrote, and the comparison of two dumps."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from assay.comparison.check import CompareOptions, compare_dumps
from assay.comparison.pairing.passes import find_passes
from assay.dumps.recognizing import open_dump
from assay.recording.capture import capture
from assay.runs import SilentProgress
from packages.core.tests.dump_writers.atb import write_operation
from packages.core.tests.dump_writers.msprobe import dumped
from packages.core.tests.fuzz.reader import Reader


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))


def _read(folder: Path) -> object:
    """Open a dump, and read its passes and every tensor."""
    dump = open_dump(folder)
    passes = [str(one) for one in find_passes(dump)]
    sums = {one.key: float(one.read().double().sum()) for one in dump.tensors if one.has_values}
    return dump.format, passes, sums, list(dump.problems)


def _compare(folder: Path) -> object:
    """Compare a dump with itself."""
    dump = open_dump(folder)
    return compare_dumps(CompareOptions("", ""), dump, dump, SilentProgress()).verdict.verdict


def _write_msprobe(folder: Path) -> None:
    network = _network()
    with torch.no_grad(), dumped(network, folder, parameters=True):
        network(torch.tensor([[1, 2, 3]]))


def _write_trace(folder: Path) -> None:
    network = _network()
    with torch.no_grad(), capture(network, folder):
        network(torch.tensor([[1, 2, 3]]))


def _write_msit(folder: Path) -> None:
    device = folder / "msit_dump_20260101_000000" / "torch_tensors" / "cpu_1"
    tree = {"name": "root", "type": "Model", "children": [
        {"name": "root.linear", "type": "Linear", "children": []},
    ]}  # fmt: skip
    for name in ("root", "root.linear"):
        (device / "0" / name).mkdir(parents=True)
        torch.save(torch.ones(2, 3), device / "0" / name / "input_0.pth")
        torch.save(torch.ones(2, 3), device / "0" / name / "output.pth")
    (device / "model_tree.json").write_text(json.dumps(tree))


def _write_atb(folder: Path) -> None:
    token = folder / "msit_dump_20260101_000000" / "tensors" / "0_1" / "0"
    write_operation(token, "0_LinearOperation", [torch.ones(2, 3)], [torch.ones(2, 3)])


def _write_sglang(folder: Path) -> None:
    run = folder / "run"
    run.mkdir()
    for index, name in enumerate(("input_ids", "non_intrusive__model.norm.output")):
        meta = {"step": 0, "rank": 0, "dump_index": index, "name": name, "dims": "b s h"}
        keys = {"step": 0, "rank": 0, "dump_index": index, "name": name}
        file = "___".join(f"{key}={value}" for key, value in keys.items())
        torch.save({"value": torch.ones(1, 2), "meta": meta}, run / f"{file}.pt")


def _write_debugger(folder: Path) -> None:
    save_file({"data": torch.ones(1, 2)}, folder / "Model_outputs.safetensors")
    tensor = {
        "shape": "torch.Size([1, 2])", "dtype": "torch.float32",
        "value": "./Model_outputs.safetensors", "mean": "tensor(1.)",
    }  # fmt: skip
    tree = {"module_path": "Model", "inputs": {"args": [tensor]}, "outputs": tensor}
    (folder / "Model_debug_tree_FULL_TENSORS.json").write_text(json.dumps(tree))


def _write_tensors(folder: Path) -> None:
    save_file({"a.weight": torch.ones(2)}, folder / "a.safetensors")
    np.save(folder / "b.npy", np.ones(2, dtype=np.float32))
    torch.save({"c": torch.ones(2)}, folder / "c.pt")


READERS = (
    Reader("dump-msprobe", _write_msprobe, _read),
    Reader("dumps-compared", _write_msprobe, _compare),
    Reader("dump-trace", _write_trace, _read),
    Reader("dump-msit", _write_msit, _read),
    Reader("dump-atb", _write_atb, _read),
    Reader("dump-sglang", _write_sglang, _read),
    Reader("dump-debugger", _write_debugger, _read),
    Reader("dump-tensors", _write_tensors, _read),
)
