"""Dumps of PyTorch models by msit: addresses, order and values, and one error for each hostile file."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from assay.dumps.protocol import Dump, DumpError
from assay.dumps.recognizing import open_dump
from assay.files import UnreadableFileError

TREE = {
    "name": "root",
    "type": "Model",
    "children": [
        {
            "name": "root.layers",
            "type": "ModuleList",
            "children": [{"name": "root.layers.0", "type": "Attention", "children": []}],
        },
        {"name": "root.head", "type": "Linear", "children": []},
    ],
}
HEADER = "NodeName,NodeType,InputOutput,Index,DataType,Shape,Max,Min,Mean,L2Norm\n"


def first_problem(path: Path) -> str:
    """Return the first problem of a dump with other readable tensors."""
    dump = open_dump(path)
    assert dump.tensors
    assert "\n" not in dump.problems[0]
    return dump.problems[0]


def save(file: Path, *values: float) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(torch.tensor(values, dtype=torch.float32), file)


def write_process(dump: Path, device: str = "cpu_7") -> Path:
    """Write a process with one token: an attention that calls matmul twice, and a head."""
    folder = dump / "torch_tensors" / device
    save(folder / "0" / "root" / "input_0.pth", 1)
    save(folder / "0" / "root" / "output.pth", 9)
    save(folder / "0" / "root.head" / "output.pth", 8)
    save(folder / "0" / "root.layers.0" / "output_0.pth", 6)
    save(folder / "0" / "root.layers.0" / "output_1_0.pth", 7)
    save(folder / "0" / "root.layers.0.matmul.10" / "output.pth", 5)
    save(folder / "0" / "root.layers.0.matmul.2" / "input_0.pth", 3)
    save(folder / "0" / "root.layers.0.matmul.2" / "output.pth", 4)
    (folder / "model_tree.json").write_text(json.dumps(TREE))
    return folder


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    return tmp_path / "out" / "msit_dump_20260101_000000"


@pytest.fixture
def process(dump: Path) -> Path:
    return write_process(dump)


def contents(dump: Dump) -> list[tuple[str, str, float]]:
    return [
        (str(one.site).removesuffix(" forward step 0"), one.class_name, one.read().item())
        for one in dump.tensors
    ]


EXPECTED = [
    ("layers.0:op.0.matmul.input.0", "Attention", 3),
    ("layers.0:op.0.matmul.output", "Attention", 4),
    ("layers.0:op.1.matmul.output", "Attention", 5),
    ("layers.0:output.0", "Attention", 6),
    ("layers.0:output.1.0", "Attention", 7),
    ("head:output", "Linear", 8),
    ("(model):input.0", "Model", 1),
    ("(model):output", "Model", 9),
]


@pytest.mark.parametrize(
    "part", ["..", ".", "torch_tensors", "torch_tensors/cpu_7", "torch_tensors/cpu_7/0"]
)
def test_every_part_of_a_dump_opens_with_calls_before_their_callers(
    dump: Path, process: Path, part: str
) -> None:
    opened = open_dump(dump / part)
    assert opened.format == "msit"
    assert contents(opened) == EXPECTED
    assert [one.order for one in opened.tensors] == list(range(8))
    assert opened.provenance == {"dump": "msit_dump_20260101_000000"}
    assert {(one.dtype, one.shape) for one in opened.tensors} == {("float32", (1,))}


def test_processes_are_ranks_in_the_order_of_their_devices(dump: Path) -> None:
    for device in ("npu10_3", "npu2_5"):
        save(dump / "torch_tensors" / device / "0" / "root.head" / "output.pth", int(device[3:-2]))
    opened = open_dump(dump)
    assert [(one.site.at.rank, one.read().item()) for one in opened.tensors] == [
        (0, 2),
        (1, 10),
    ]


def test_tokens_are_steps_in_numerical_order(process: Path) -> None:
    for token in (2, 10):
        save(process / str(token) / "root.head" / "output.pth", token)
    steps = [one.site.at.step for one in open_dump(process).tensors]
    assert steps == [0] * 8 + [2, 10]


def test_weights_are_parameters_of_the_first_token(process: Path) -> None:
    (process / "weights").mkdir()
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    torch.save(weight, process / "weights" / "root.layers.0.q.weight.pth")
    opened = open_dump(process)
    assert str(opened.tensors[0].site) == "layers.0.q:parameter.weight forward step 0"
    assert opened.tensors[0].read().tolist() == [2.0]


def test_file_with_an_unknown_name_is_an_output_of_that_name(process: Path) -> None:
    save(process / "1" / "root.head" / "output_exec1.pth", 1)
    assert open_dump(process).tensors[-1].site.port == "output_exec1"


def test_wrappers_are_not_part_of_a_module(process: Path) -> None:
    save(process / "1" / "root._orig_mod.layers.1" / "output.pth", 1)
    assert open_dump(process).tensors[-1].site.at.module == "layers.1"


def test_folder_without_a_tree_opens_without_classes(process: Path) -> None:
    (process / "model_tree.json").unlink()
    modules = {one.site.at.module for one in open_dump(process).tensors}
    assert "layers.0.matmul.2" in modules  # it could be a module
    assert {one.class_name for one in open_dump(process).tensors} == {""}


def write_statistics(process: Path, rows: str) -> Path:
    file = process / "1" / "root.head" / "statistics.csv"
    file.parent.mkdir(parents=True)
    file.write_text(HEADER + rows)
    return file


def test_statistics_of_two_calls(process: Path) -> None:
    write_statistics(
        process,
        'root.head,Linear,Input,0,torch.bfloat16,"(2, 3)",4.0,-1.0,0.5,5.0\n'
        'root.head,Linear,Output,0,torch.bfloat16,"(2,)",1.0,1.0,1.0,nan\n'
        "root.head,Linear,Input,0,torch.int64,(),4.0,4.0,4.0,4.0\n"
        'root.head,Linear,Output,0,torch.float32,"(1,)",1.0,1.0,1.0,1.0\n'
        'root.head,Linear,Output,0,torch.float32,"(1,)",2.0,2.0,2.0,2.0\n',
    )
    rows = open_dump(process).tensors[8:]
    assert [(one.site.at.call, one.site.port) for one in rows] == [
        (0, "input.0"),
        (0, "output"),
        (1, "input.0"),
        (1, "output.0"),
        (1, "output.1"),
    ]
    assert [one.shape for one in rows] == [(2, 3), (2,), (), (1,), (1,)]
    assert rows[0].dtype == "bfloat16"
    assert rows[0].statistics == {"max": 4.0, "min": -1.0, "mean": 0.5, "norm": 5.0}
    assert not any(one.has_values for one in rows)


@pytest.mark.parametrize(
    "row",
    [
        "root.head,Linear,Middle,0,torch.float32,(),1,1,1,1\n",
        "root.head,Linear,Input,x,torch.float32,(),1,1,1,1\n",
        "root.head,Linear,Input,0,torch.float32,(a),1,1,1,1\n",
        'root.head,Linear,Input,0,torch.float32,"(-1,)",1,1,1,1\n',
        "root.head,Linear,Input,0,torch.float32,(),one,1,1,1\n",
        "root.head,Linear,Input\n",
    ],
)
def test_broken_row_is_one_error_with_its_line(process: Path, row: str) -> None:
    good = "root.head,Linear,Input,0,torch.float32,(),1,1,1,1\n"
    file = write_statistics(process, good + row)
    assert first_problem(process).startswith(f"{file}, line 3: not a row of statistics: ")


def test_two_dumps_in_one_folder_are_named(dump: Path, process: Path) -> None:
    write_process(dump.with_name("msit_dump_2"), "cpu_8")
    with pytest.raises(DumpError) as caught:
        open_dump(dump.parent)
    assert str(caught.value) == (
        f"{dump.parent} holds several dumps; name one of them: "
        "msit_dump_2/torch_tensors, msit_dump_20260101_000000/torch_tensors"
    )


class Dangerous:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch /tmp/never",)


def write_pickle(file: Path) -> None:
    torch.save(Dangerous(), file)


def write_truncated(file: Path) -> None:
    save(file, *range(1000))
    file.write_bytes(file.read_bytes()[:2000])


def write_list(file: Path) -> None:
    torch.save([torch.zeros(1)], file)


def write_meta(file: Path) -> None:
    torch.save(torch.empty(2, device="meta"), file)


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (write_pickle, "objects other than tensors"),
        (write_truncated, "not a file of torch.save"),
        (write_list, "its content is a list, not a tensor"),
        (write_meta, "not a dense tensor"),
        (os.mkfifo, "it is a FIFO, a socket or a device, not a file"),
        (Path.mkdir, "it is a folder, not a file"),
        (lambda file: file.symlink_to("/etc/passwd"), "it lies outside of the dump"),
        (lambda file: file.symlink_to(file), "Symlink loop"),
        (lambda file: file.write_bytes(b""), "not a file of torch.save"),
    ],
    ids=["pickle", "truncated", "list", "meta", "fifo", "folder", "link", "loop", "empty"],
)
def test_hostile_file_is_one_error(
    process: Path, write: Callable[[Path], object], problem: str
) -> None:
    file = process / "0" / "root.head" / "input_0.pth"
    write(file)
    assert first_problem(process).startswith(f"{file}: ")
    assert problem in first_problem(process)


def test_claim_of_10_gb_is_refused_when_it_is_read(process: Path) -> None:
    torch.save(torch.zeros(1).expand(2_500_000_000), process / "0" / "root.head" / "input_0.pth")
    opened = open_dump(process)
    hostile = next(one for one in opened.tensors if one.shape == (2_500_000_000,))
    with pytest.raises(UnreadableFileError, match="more elements than are stored"):
        hostile.read()


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        (b"{}", "a module has no name"),
        (b'{"name": "root", "children": [3]}', "a module has no name"),
        (b"[]", "not a JSON object"),
        (b"\xe9", "not UTF-8"),
        (b'{"name": "root"', "not JSON"),
        (b'{"name":"a","children":[' * 200 + b"]}" * 200, "nested deeper"),
    ],
    ids=["empty", "number", "list", "latin-1", "cut", "deep"],
)
def test_hostile_tree_is_one_error(process: Path, tree: bytes, problem: str) -> None:
    (process / "model_tree.json").write_bytes(tree)
    with pytest.raises(UnreadableFileError, match=problem):
        open_dump(process)


def test_link_to_a_dump_elsewhere_is_refused(tmp_path: Path, dump: Path, process: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "msit_dump_3").symlink_to(dump)
    with pytest.raises(UnreadableFileError, match="it lies outside of the dump"):
        open_dump(tmp_path / "other")


def test_path_with_a_nul_character_is_not_a_dump() -> None:
    with pytest.raises(DumpError, match="there is no file or folder"):
        open_dump("a\0b")
