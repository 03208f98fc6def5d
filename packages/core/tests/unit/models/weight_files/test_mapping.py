"""One tensor of a safetensors file, mapped by itself."""

import json
import os
from pathlib import Path

import pytest
import torch

from assay.files import UnreadableFileError
from assay.files.safetensors import HeaderEntry, read_header
from assay.models.weight_files.mapping import dtype_of, map_tensor


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
