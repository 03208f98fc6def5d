"""Dumps of Transformers' model debugger: values in files, printed values, statistics only."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from assay.dumps.protocol import Dump, DumpError
from assay.dumps.recognizing import open_dump
from assay.files import UnreadableFileError

TREE = "TinyModel_debug_tree_FULL_TENSORS.json"
SUMMARY = "TinyModel_debug_tree_SUMMARY.json"


def tensor(value: object, shape: str = "[2]", **statistics: str) -> dict[str, Any]:
    described = {"shape": f"torch.Size({shape})", "dtype": "torch.float32", "value": value}
    return described | {name: f"tensor({text})" for name, text in statistics.items()}


def call(path: str, args: object = (), kwargs: object = None, **fields: object) -> dict[str, Any]:
    return {"module_path": path, "inputs": {"args": args, "kwargs": kwargs or {}}, **fields}


def write(folder: Path, root: object, name: str = TREE) -> Path:
    (folder / name).write_text(json.dumps(root))
    return folder


def save(folder: Path, name: str, values: list[float], key: str = "data") -> str:
    save_file({key: torch.tensor(values)}, folder / f"{name}.safetensors")
    return f"./{name}.safetensors"


def addresses(dump: Dump) -> list[str]:
    return [str(one.site).replace(" forward step 0", "") for one in dump.tensors]


@pytest.fixture
def two_layers(tmp_path: Path) -> Path:
    """A model of a block with one layer, and a head. Values are in files."""
    layer = call(
        "TinyModel.block.0",
        [tensor(save(tmp_path, "l_in", [1.0, 2.0])), "None"],
        {"scales": [tensor(save(tmp_path, "l_scale", [3.0]), "[1]")], "use_cache": "True"},
        outputs=tensor(
            save(tmp_path, "l_out", [4.0, 5.0]), mean="4.5000e+00", max="5., device='x:0'"
        ),
    )
    block = call("TinyModel.block", [tensor(save(tmp_path, "b_in", [1.0, 2.0]))], children=[layer])
    head = call(
        "TinyModel.head",
        outputs=[
            tensor(save(tmp_path, "h0", [6.0]), "[1]"),
            tensor(save(tmp_path, "h1", [7.0]), "[1]"),
        ],
    )
    outputs = {"logits": tensor(save(tmp_path, "logits", [8.0]), "[1]")}
    return write(tmp_path, call("TinyModel", children=[block, head], outputs=outputs))


def test_calls_are_listed_as_they_ended_and_without_the_class(two_layers: Path) -> None:
    assert addresses(open_dump(two_layers)) == [
        "block.0:input.0",
        "block.0:input.scales.0",
        "block.0:output",
        "block:input.0",
        "head:output.0",
        "head:output.1",
        "(model):output.logits",
    ]


def test_values_are_read_from_their_files(two_layers: Path) -> None:
    dump = open_dump(two_layers)
    values = [one.read().tolist() for one in dump.tensors]
    assert values == [[1.0, 2.0], [3.0], [4.0, 5.0], [1.0, 2.0], [6.0], [7.0], [8.0]]
    assert [one.order for one in dump.tensors] == [0, 1, 2, 3, 4, 5, 6]


def test_printed_statistics_are_parsed(two_layers: Path) -> None:
    output = open_dump(two_layers).tensors[2]
    assert (output.dtype, output.shape, output.key) == (
        "float32",
        (2,),
        "TinyModel.block.0: output",
    )
    assert output.statistics == {"mean": 4.5, "max": 5.0}


@pytest.mark.parametrize(("shape", "dims"), [("[]", ()), ("[3]", (3,)), ("[1, 20, 0]", (1, 20, 0))])
def test_shape_is_parsed(tmp_path: Path, shape: str, dims: tuple[int, ...]) -> None:
    (only,) = open_dump(write(tmp_path, call("TinyModel", [tensor([], shape)]))).tensors
    assert only.shape == dims


def test_class_of_the_model_is_known(two_layers: Path) -> None:
    assert [one.class_name for one in open_dump(two_layers).tensors[-2:]] == ["", "TinyModel"]


def test_printed_values_are_not_read(tmp_path: Path) -> None:
    printed = tensor(
        ["tensor([1.0000e+00, ..., 2.0000e+00])"], std="1.5000e+00, dtype=torch.bfloat16"
    )
    (only,) = open_dump(write(tmp_path, call("TinyModel", [printed]))).tensors
    assert (only.has_values, only.statistics) == (False, {"std": 1.5})


def test_summary_alone_has_statistics(tmp_path: Path) -> None:
    entry = tensor(None, min="-2., grad_fn=<MinBackward1>", max="nan") | {"dtype": "torch.bfloat16"}
    del entry["value"]
    (only,) = open_dump(write(tmp_path, call("TinyModel", [entry]), SUMMARY)).tensors
    assert (only.has_values, only.dtype, only.statistics["min"]) == (False, "bfloat16", -2.0)
    assert only.statistics["max"] != only.statistics["max"]  # a NaN


def test_full_tree_is_preferred_and_either_can_be_named(two_layers: Path) -> None:
    write(two_layers, call("TinyModel"), SUMMARY)
    assert open_dump(two_layers).provenance["tree"] == TREE
    assert len(open_dump(two_layers / TREE).tensors) == 7
    assert list(open_dump(two_layers / SUMMARY).tensors) == []


def test_earlier_calls_of_a_module_have_no_values(tmp_path: Path) -> None:
    """The debugger names files by module: a second call overwrites the values of the first."""
    calls = [
        call("TinyModel.a", outputs=tensor(save(tmp_path, "a", [9.0]), "[1]")) for _ in range(2)
    ]
    dump = open_dump(write(tmp_path, call("TinyModel", children=calls)))
    assert addresses(dump) == ["a:output", "a:output call 1"]
    assert [one.has_values for one in dump.tensors] == [False, True]
    assert dump.tensors[1].read().tolist() == [9.0]
    assert list(dump.problems) == ["./a.safetensors holds only the last of 2 calls of its module"]


def test_missing_file_is_a_problem(two_layers: Path) -> None:
    (two_layers / "h0.safetensors").unlink()
    dump = open_dump(two_layers)
    assert (len(dump.tensors), list(dump.problems)) == (6, ["h0.safetensors is missing"])


def test_dumps_of_two_models_have_to_be_told_apart(two_layers: Path) -> None:
    write(two_layers, call("OtherModel"), "OtherModel_debug_tree_SUMMARY.json")
    with pytest.raises(DumpError, match="holds the dumps of 2 models: name one of OtherModel_"):
        open_dump(two_layers)


@pytest.mark.parametrize(
    ("root", "problem"),
    [
        ([], "it is not a tree of calls"),
        ({"module_path": 1}, "it is not a tree of calls"),
        (call("TinyModel", [tensor("", "[-1, 2]")]), "'torch.Size([-1, 2])' is not a shape"),
        (call("TinyModel", [tensor("", "[1e9]")]), "'torch.Size([1e9])' is not a shape"),
        (call("TinyModel", [tensor("", "[1 2]")]), "'torch.Size([1 2])' is not a shape"),
        (call("TinyModel", children=["text"]), "a child of TinyModel is not a call"),
        (call("TinyModel", children=5), "a child of TinyModel is not a call"),
        (call("TinyModel", [tensor("../secret.safetensors")]), "outside of the dump"),
        (call("TinyModel", [tensor("/etc/passwd")]), "outside of the dump"),
        (call("TinyModel", [tensor("link.safetensors")]), "outside of the dump"),
        (call("TinyModel", [tensor("a\0b")]), "null"),
    ],
)
def test_hostile_tree_is_one_error(tmp_path: Path, root: object, problem: str) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    (tmp_path / "secret.safetensors").touch()
    (folder / "link.safetensors").symlink_to("../secret.safetensors")
    with pytest.raises(UnreadableFileError) as raised:
        open_dump(write(folder, root))
    assert problem in str(raised.value)


@pytest.mark.parametrize("text", ["", '{"module_path": "TinyModel", "children": [', "[" * 5000])
def test_damaged_tree_is_one_error(tmp_path: Path, text: str) -> None:
    (tmp_path / TREE).write_text(text)
    with pytest.raises(UnreadableFileError, match="FULL_TENSORS"):
        open_dump(tmp_path)


def test_file_of_another_content_is_one_error(two_layers: Path) -> None:
    save(two_layers, "h0", [1.0], key="other")
    (two_layers / "h1.safetensors").write_bytes(b"\xff" * 20)
    dump = open_dump(two_layers)
    with pytest.raises(UnreadableFileError, match=r"h0\.safetensors: it holds no tensor `data`"):
        dump.tensors[4].read()
    with pytest.raises(
        UnreadableFileError, match=r"h1\.safetensors is truncated or no safetensors file"
    ):
        dump.tensors[5].read()
