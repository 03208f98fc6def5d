"""One tensor of a safetensors file, mapped by itself."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from assay.files import UnreadableFileError
from assay.files.safetensors import HeaderEntry, read_header
from assay.models.stored_tensors import dtype_of, load_objects, map_tensor, read_pickled


def write(path: Path, dtype: str, shape: list[int], data: bytes) -> HeaderEntry:
    """Write a file of one tensor. Its header has an odd length, so that the data is not aligned."""
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}
    header = json.dumps({"a": entry}).encode()
    header += b" " * (1 - len(header) % 2)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    (stored,) = read_header(path)
    return stored


def test_values_that_are_not_aligned_are_read(tmp_path: Path) -> None:
    stored = write(tmp_path / "a", "I32", [1, 2], bytes([1, 0, 0, 0, 2, 0, 0, 0]))
    assert stored.start % 4
    assert map_tensor(stored).tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("dtype", "data", "expected"),
    [
        ("BF16", b"\x80\x3f", torch.tensor([1.0], dtype=torch.bfloat16)),
        ("U16", b"\xff\xff", torch.tensor([65535], dtype=torch.uint16)),
        ("BOOL", b"\x01", torch.tensor([True])),
        ("C64", bytes(4) + b"\x00\x00\x80\x3f", torch.tensor([1j])),
        ("F8_E8M0", b"\x7f", torch.tensor([1.0]).to(torch.float8_e8m0fnu)),
    ],
)
def test_dtypes(tmp_path: Path, dtype: str, data: bytes, expected: torch.Tensor) -> None:
    stored = write(tmp_path / "a", dtype, [1], data)
    value = map_tensor(stored)
    assert (value.dtype, value.shape, value.tolist()) == (expected.dtype, (1,), expected.tolist())
    assert f"torch.{dtype_of(stored)}" == str(expected.dtype)


def test_tensor_without_elements(tmp_path: Path) -> None:
    assert map_tensor(write(tmp_path / "a", "F32", [0, 3], b"")).shape == (0, 3)


def test_change_is_not_written(tmp_path: Path) -> None:
    stored = write(tmp_path / "a", "U8", [2], b"\x01\x02")
    map_tensor(stored).zero_()
    assert map_tensor(stored).tolist() == [1, 2]


def test_unknown_dtype_is_refused(tmp_path: Path) -> None:
    stored = write(tmp_path / "a", "F4", [4], b"\x01\x02")
    with pytest.raises(UnreadableFileError) as raised:
        map_tensor(stored)
    assert str(raised.value) == (
        f"{tmp_path / 'a'}: a has 2 bytes of dtype F4, which assay cannot read"
    )


def test_wrong_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFileError) as raised:
        write(tmp_path / "a", "F8_E8M0", [3], b"\x01\x02")
    assert str(raised.value) == f"{tmp_path / 'a'}: a has 2 bytes for 3 values of F8_E8M0"


def test_file_that_became_a_pipe_is_refused(tmp_path: Path) -> None:
    stored = write(tmp_path / "a", "U8", [2], b"\x01\x02")
    (tmp_path / "a").unlink()
    os.mkfifo(tmp_path / "a")
    with pytest.raises(UnreadableFileError, match="it is a FIFO"):
        map_tensor(stored)


class _Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch hostile",)


def one_number(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(1).expand(shape)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"a": _Hostile()}, "objects other than tensors, which assay does not unpickle"),
        (nn.Linear(1, 1), "objects other than tensors, which assay does not unpickle"),
        ([1, 2], "it holds a list instead of named tensors"),
        (torch.zeros(1), "it holds a Tensor instead of named tensors"),
        ({"a": one_number((1 << 20, 1 << 20))}, "a has more elements than are stored"),
        ({"a": torch.zeros(1, dtype=torch.complex64)}, "a is a torch.strided of torch.complex64"),
        ({"a": torch.eye(2).to_sparse()}, "a is a torch.sparse_coo of torch.float32"),
    ],
)
def test_other_content_is_refused(tmp_path: Path, content: object, problem: str) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(UnreadableFileError) as raised:
        read_pickled(tmp_path)
    message = str(raised.value)
    assert message.endswith(problem)
    assert "weights_only" not in message
    assert not Path("hostile").exists()


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"a": 1}), b"PK\x03\x04"])
def test_damaged_file_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(UnreadableFileError, match=r"pytorch_model\.bin: ") as raised:
        read_pickled(tmp_path)
    assert "\n" not in str(raised.value)
    assert "weights_only" not in str(raised.value)


def test_tensors_are_read(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "step": 3}, tmp_path / "pytorch_model.bin")
    assert list(read_pickled(tmp_path)) == ["a"]


TENSORS = {
    "rows": torch.arange(12.0).view(3, 4),
    "a view": torch.arange(24.0).view(6, 4)[1::2, 1:],
    "expanded": torch.arange(4.0).expand(3, 4),
    "bfloat16": torch.arange(5).bfloat16(),
    "empty": torch.empty(0, 3),
    "a scalar": torch.tensor(2.5),
    "with a gradient": torch.ones(2, requires_grad=True),
    "a parameter": nn.Parameter(torch.ones(2)),
    "complex": torch.arange(3).to(torch.complex64).conj(),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_files_with_one_pickle_are_read_alike(tmp_path: Path, kind: str) -> None:
    """The second file is read by the layout of the first."""
    tensor, files = TENSORS[kind], (tmp_path / "first.pt", tmp_path / "second.pt")
    torch.save(tensor, files[0])
    tensor.untyped_storage()[:1] = 1
    torch.save(tensor, files[1])
    for file in files:
        expected = torch.load(file, weights_only=True)
        found = load_objects(file)
        assert isinstance(found, torch.Tensor)
        assert type(found) is type(expected)
        assert found.requires_grad == expected.requires_grad
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_file_cut_off_is_refused_after_one_with_its_pickle(tmp_path: Path) -> None:
    whole, cut_off = tmp_path / "whole.pt", tmp_path / "cut_off.pt"
    torch.save(torch.ones(1000), whole)
    load_objects(whole)
    cut_off.write_bytes(whole.read_bytes()[:-2000])
    with pytest.raises(UnreadableFileError, match="cut off"):
        load_objects(cut_off)
