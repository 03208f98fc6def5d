"""Loose tensor files: their content, and the module and port guessed from each name."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from assay.dumps import reading
from assay.dumps.protocol import Dump, DumpError
from assay.dumps.recognizing import open_dump
from assay.files import UnreadableFileError


class _Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch hostile",)


def contents(dump: Dump) -> dict[str, object]:
    return {
        str(one.site).removesuffix(" forward step 0"): one.read().tolist() for one in dump.tensors
    }


def test_safetensors_file(tmp_path: Path) -> None:
    save_file({"model.norm.output": torch.tensor([1.0, 2.0])}, tmp_path / "a.safetensors")
    dump = open_dump(tmp_path / "a.safetensors")
    (only,) = dump.tensors
    assert (dump.format, only.key) == ("tensors", "a.safetensors:model.norm.output")
    assert (only.dtype, only.shape) == ("float32", (2,))
    assert contents(dump) == {"model.norm:output": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("array", "expected", "dtype"),
    [
        (np.array([[1, 2]], dtype=np.int32), [[1, 2]], "int32"),
        (np.array([1.5], dtype=">f4"), [1.5], "float32"),
        (np.array(2.5, dtype=np.float16), 2.5, "float16"),
        (np.zeros((0, 3)), [], "float64"),
        (np.array([[1.0, 2.0], [3.0, 4.0]], order="F"), [[1.0, 2.0], [3.0, 4.0]], "float64"),
    ],
)
def test_numpy_file(tmp_path: Path, array: np.ndarray, expected: object, dtype: str) -> None:
    np.save(tmp_path / "model.norm.output.npy", array)
    dump = open_dump(tmp_path / "model.norm.output.npy")
    assert contents(dump) == {"model.norm:output": expected}
    assert (dump.tensors[0].dtype, dump.tensors[0].shape) == (dtype, array.shape)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_numpy_archive(tmp_path: Path, save: Callable[..., None]) -> None:
    arrays = {"b.output": np.array([1.0, 2.0], ">f4"), "a.input.0": np.array([[3]], np.int64)}
    save(tmp_path / "x.npz", **arrays)
    for path in (tmp_path, tmp_path / "x.npz"):
        dump = open_dump(path)
        assert contents(dump) == {"b:output": [1.0, 2.0], "a:input.0": [[3]]}
        assert [(one.dtype, one.shape) for one in dump.tensors] == [
            ("float32", (2,)),
            ("int64", (1, 1)),
        ]


def write_archive(path: Path, content: bytes, **options: Any) -> None:
    with ZipFile(path, "w", **options) as archive:
        archive.writestr("a.npy", content)


def header(shape: str) -> bytes:
    """Return the start of an .npy file of float64 values, without the values."""
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lambda path: np.savez(path, a=np.array([{}])), "no array of numbers"),
        (lambda path: np.savez(path, a=np.array(["text"])), "no array of numbers"),
        (lambda path: path.write_bytes(b"PK"), "no array of numbers"),
        (lambda path: write_archive(path, b"text"), "no array of numbers"),
        (lambda path: write_archive(path, header("(10000000000,)")), "a.npy is cut off"),
        (os.mkfifo, "not a file"),
    ],
)
def test_hostile_archive_is_one_error(
    tmp_path: Path, write: Callable[[Path], object], problem: str
) -> None:
    write(tmp_path / "x.npz")
    with pytest.raises(UnreadableFileError, match=problem):
        open_dump(tmp_path)


def test_archive_that_would_expand_beyond_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_MAX_EXPANDED_BYTES", 1000)
    np.savez_compressed(tmp_path / "x.npz", a=np.zeros(1000))
    with pytest.raises(UnreadableFileError, match=r"a\.npy is too large to decompress"):
        open_dump(tmp_path)
    np.savez(tmp_path / "x.npz", a=np.zeros(1000))
    assert open_dump(tmp_path).tensors[0].shape == (1000,)


def test_change_to_what_was_read_is_not_written(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1.0]))
    dump = open_dump(tmp_path)
    dump.tensors[0].read()[0] = 2.0
    assert np.load(tmp_path / "a.npy").tolist() == [1.0]


def test_torch_file_with_one_tensor(tmp_path: Path) -> None:
    torch.save(nn.Parameter(torch.tensor([3.0])), tmp_path / "lm_head.weight.pt")
    dump = open_dump(tmp_path)
    assert contents(dump) == {"lm_head:parameter.weight": [3.0]}
    assert not dump.tensors[0].read().requires_grad


def test_torch_file_with_tensors_by_name(tmp_path: Path) -> None:
    complex_number = torch.tensor([1j])
    content = {"norm": torch.tensor([1.0]), "step": 3, "block": {"0": [complex_number, None]}}
    torch.save(content, tmp_path / "a.pth")
    assert contents(open_dump(tmp_path)) == {"norm:output": [1.0], "block.0.0:output": [1j]}


def test_expanded_tensor_is_read(tmp_path: Path) -> None:
    torch.save(torch.tensor([[5.0]]).expand(2, 3), tmp_path / "mask.pt")
    assert contents(open_dump(tmp_path)) == {"mask:output": [[5.0] * 3] * 2}


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("a.b.output", "a.b:output"),
        ("a.b.output.1", "a.b:output.1"),
        ("a.b.input.0", "a.b:input.0"),
        ("a.b.input.hidden_states", "a.b:input.hidden_states"),
        ("a.b.input.position_embeddings.1", "a.b:input.position_embeddings.1"),
        ("input.input_ids", "(model):input.input_ids"),
        ("output", "(model):output"),
        ("a.b.weight", "a.b:parameter.weight"),
        ("a.b.parameter.weight_scale", "a.b:parameter.weight_scale"),
        ("encoder.0.output.dense.bias", "encoder.0.output.dense:parameter.bias"),
        ("encoder.0.output.dense", "encoder.0.output.dense:output"),
        ("module._orig_mod.a.output", "a:output"),
        ("logits", "logits:output"),
    ],
)
def test_name_is_taken_for_module_and_port(tmp_path: Path, name: str, address: str) -> None:
    save_file({name: torch.zeros(1)}, tmp_path / "a.safetensors")
    assert list(contents(open_dump(tmp_path))) == [address]


def test_file_of_a_folder_names_its_tensor(tmp_path: Path) -> None:
    (tmp_path / "layers" / "0").mkdir(parents=True)
    np.save(tmp_path / "layers" / "0" / "output.npy", np.array([1.0]))
    np.save(tmp_path / "embedding.npy", np.array([2.0]))
    (tmp_path / ".hidden").touch()
    dump = open_dump(tmp_path)
    assert contents(dump) == {"embedding:output": [2.0], "layers.0:output": [1.0]}
    assert [one.key for one in dump.tensors] == ["embedding.npy", "layers/0/output.npy"]


def test_name_that_two_files_have_is_preceded_by_theirs(tmp_path: Path) -> None:
    for step in (0, 1):
        save_file({"norm.output": torch.tensor([step])}, tmp_path / f"step{step}.safetensors")
    assert contents(open_dump(tmp_path)) == {"step0.norm:output": [0], "step1.norm:output": [1]}


def test_two_names_of_one_address_stay_apart(tmp_path: Path) -> None:
    save_file({"a": torch.tensor([0]), "a.output": torch.tensor([1])}, tmp_path / "a.safetensors")
    assert contents(open_dump(tmp_path)) == {"a:output": [0], "a.output:output": [1]}


@pytest.mark.parametrize("other", ["config.json", "notes.txt", "a/b/c/d/x.npy"])
def test_folder_with_anything_else_is_not_recognized(tmp_path: Path, other: str) -> None:
    np.save(tmp_path / "a.npy", np.zeros(1))
    (tmp_path / other).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / other).touch()
    with pytest.raises(DumpError, match="is not a dump of a known format"):
        open_dump(tmp_path)


def test_empty_folder_is_not_recognized(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="is not a dump of a known format"):
        open_dump(tmp_path)


def test_linked_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "dump").mkdir()
    np.save(tmp_path / "dump" / "a.npy", np.zeros(1))
    (tmp_path / "dump" / "up").symlink_to("..")
    with pytest.raises(DumpError, match="is not a dump of a known format"):
        open_dump(tmp_path / "dump")


def test_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dump").mkdir()
    np.save(tmp_path / "secret.npy", np.zeros(1))
    (tmp_path / "dump" / "a.npy").symlink_to("../secret.npy")
    with pytest.raises(UnreadableFileError, match=r"a\.npy: it lies outside of the dump"):
        open_dump(tmp_path / "dump")


def save_objects(path: Path) -> None:
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)


def claim_ten_gigabytes(path: Path) -> None:
    np.save(path, np.zeros(10))
    data = path.read_bytes()
    path.write_bytes(data.replace(b"'shape': (10,), }           ", b"'shape': (10000000000,), }  "))


def spoil_header(path: Path) -> None:
    np.save(path, np.zeros(10))
    path.write_bytes(path.read_bytes().replace(b"), }   ", b"), }  ["))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.npy", save_objects),
        ("a.npy", claim_ten_gigabytes),
        ("a.npy", lambda path: np.save(path, np.array(["text"]))),
        ("a.npy", lambda path: path.write_bytes(b"")),
        ("a.npy", spoil_header),
        ("a.npy", lambda path: path.write_bytes(pickle.dumps(_Hostile()))),
        ("a.npy", os.mkfifo),
        ("a.pt", lambda path: torch.save(_Hostile(), path)),
        ("a.pt", lambda path: torch.save({"a": _Hostile()}, path)),
        ("a.pt", lambda path: torch.save({"a": 1}, path)),
        ("a.pt", lambda path: torch.save(torch.eye(2).to_sparse(), path)),
        ("a.pt", lambda path: torch.save(torch.zeros(1).expand(1 << 20, 1 << 20), path)),
        ("a.pth", lambda path: path.write_bytes(b"PK\x03\x04")),
        ("a.pth", os.mkfifo),
        ("a.safetensors", lambda path: path.write_bytes((1 << 60).to_bytes(8, "little"))),
        ("a.safetensors", lambda path: path.write_bytes(b"\x02" + bytes(7) + b"[]")),
        ("a.safetensors", os.mkfifo),
    ],
)
def test_hostile_file_is_one_error(
    tmp_path: Path, name: str, write: Callable[[Path], object]
) -> None:
    write(tmp_path / name)
    with pytest.raises(UnreadableFileError) as raised:
        open_dump(tmp_path)
    assert str(raised.value).startswith(str(tmp_path / name))
    assert "\n" not in str(raised.value)
    assert not Path("hostile").exists()


def test_damaged_file_among_others_is_a_problem(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1.0]))
    (tmp_path / "b.npy").touch()
    dump = open_dump(tmp_path)
    assert contents(dump) == {"a:output": [1.0]}
    (problem,) = dump.problems
    assert problem.startswith(f"{tmp_path / 'b.npy'}: no array of numbers: ")


@pytest.mark.parametrize("suffix", ["safetensors", "npy", "pt"])
def test_file_that_vanished_after_opening_is_one_error(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    writers = {"safetensors": save_file, "npy": lambda v, p: np.save(p, v["a"]), "pt": torch.save}
    writers[suffix]({"a": torch.zeros(1)}, path)
    dump = open_dump(path)
    path.unlink()
    with pytest.raises(UnreadableFileError, match=str(path)):
        dump.tensors[0].read()


def test_torch_file_that_changed_after_opening_is_one_error(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "a.pt")
    dump = open_dump(tmp_path)
    torch.save({"b": torch.zeros(1)}, tmp_path / "a.pt")
    os.utime(tmp_path / "a.pt", ns=(0, 0))
    with pytest.raises(UnreadableFileError, match="it no longer holds a"):
        dump.tensors[0].read()


def test_dtypes_of_safetensors_have_torch_names(tmp_path: Path) -> None:
    dtypes = [torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.uint16, torch.bool]
    save_file({str(d): torch.zeros(1).to(d) for d in dtypes}, tmp_path / "a.safetensors")
    dump = open_dump(tmp_path)
    assert {one.read().dtype for one in dump.tensors} == set(dtypes)
    assert {f"torch.{one.dtype}" for one in dump.tensors} == {str(dtype) for dtype in dtypes}


def test_the_arguments_of_a_model_are_its_inputs(tmp_path: Path) -> None:
    save_file({"input_ids": torch.tensor([[7, 8]])}, tmp_path / "a.safetensors")
    assert contents(open_dump(tmp_path / "a.safetensors")) == {"(model):input.input_ids": [[7, 8]]}
