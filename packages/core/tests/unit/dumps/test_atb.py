"""Dumps of Ascend Transformer Boost models: the file format, links, folders, and hostile files."""

import os
import re
import resource
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from assay.dumps.protocol import Dump, DumpError
from assay.dumps.recognizing import open_dump
from assay.files import UnreadableFileError

FLOAT32, FLOAT16, INT8, INT32, INT64, BOOL, BFLOAT16 = 0, 1, 2, 3, 9, 12, 27


def first_problem(path: Path) -> str:
    """Return the first problem of a dump with other readable tensors."""
    dump = open_dump(path)
    assert dump.tensors
    assert "\n" not in dump.problems[0]
    return dump.problems[0]


def header(dims: str, dtype: int, length: int, *more: str) -> bytes:
    lines = (
        "$Version=1.0",
        "$Object.Count=1",
        f"$Object.Length={length}",
        "format=2",
        f"dtype={dtype}",
        f"dims={dims}",
        *more,
        "$End=1",
    )
    return "".join(f"{line}\n" for line in lines).encode()


def write(file: Path, values: bytes, dims: str, dtype: int) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    data = f"$Object.data=0,{len(values)}"
    file.write_bytes(header(dims, dtype, len(values), data) + values)
    return file


def write_float(file: Path, value: float) -> Path:
    return write(file, struct.pack("<f", value), "1", FLOAT32)


def write_link(file: Path, target: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(header("1", FLOAT32, 0, f"data={target}"))
    return file


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    return tmp_path / "out" / "msit_dump_20260101_000000"


@pytest.fixture
def token(dump: Path) -> Path:
    """Write a token with two layers; the second has two operations."""
    token = dump / "tensors" / "0_77" / "0"
    write_float(token / "2_Head" / "after" / "outtensor0.bin", 9)
    write_float(token / "10_Tail" / "after" / "outtensor0.bin", 10)
    layer = token / "1_Attention"
    write_float(layer / "before" / "intensor0.bin", 1)
    write_float(layer / "after" / "outtensor1.bin", 8)
    write_float(layer / "after" / "outtensor0.bin", 7)
    write_float(layer / "0_LinearOperation" / "before" / "intensor10.bin", 4)
    write_float(layer / "0_LinearOperation" / "before" / "intensor2.bin", 3)
    write_float(layer / "0_LinearOperation" / "after" / "outtensor0.bin", 5)
    (layer / "0_LinearOperation" / "op_param.json").write_text("{}")
    return token


EXPECTED = [
    ("1_Attention.0_LinearOperation:input.2", "LinearOperation", 3),
    ("1_Attention.0_LinearOperation:input.10", "LinearOperation", 4),
    ("1_Attention.0_LinearOperation:output", "LinearOperation", 5),
    ("1_Attention:input.0", "Attention", 1),
    ("1_Attention:output.0", "Attention", 7),
    ("1_Attention:output.1", "Attention", 8),
    ("2_Head:output", "Head", 9),
    ("10_Tail:output", "Tail", 10),
]


def contents(dump: Dump) -> list[tuple[str, str, float]]:
    return [
        (str(one.site).removesuffix(" forward step 0"), one.class_name, one.read().item())
        for one in dump.tensors
    ]


def only(path: Path) -> torch.Tensor:
    dump = open_dump(path)
    (tensor,) = dump.tensors
    value = tensor.read()
    assert (str(value.dtype).removeprefix("torch."), tuple(value.shape)) == (
        tensor.dtype,
        tensor.shape,
    )
    return value


class TestFolders:
    @pytest.mark.parametrize("part", ["..", ".", "tensors", "tensors/0_77", "tensors/0_77/0"])
    def test_every_part_opens_with_inner_operations_first(
        self, dump: Path, token: Path, part: str
    ) -> None:
        opened = open_dump(dump / part)
        assert opened.format == "atb"
        assert contents(opened) == EXPECTED
        assert [one.order for one in opened.tensors] == list(range(8))

    def test_layout_of_msprobe(self, tmp_path: Path) -> None:
        device = tmp_path / "atb_dump_data" / "data" / "0_7"
        write_float(device / "0" / "0_Head" / "after" / "outtensor0.bin", 2)
        assert contents(open_dump(tmp_path)) == [("0_Head:output", "Head", 2)]

    def test_devices_are_ranks_and_tokens_are_steps(self, dump: Path) -> None:
        for device, number, value in (("10_5", 3, 4), ("2_6", 10, 2), ("2_6", 9, 1)):
            write_float(
                dump / "tensors" / device / str(number) / "0_Head" / "after" / "outtensor0.bin",
                value,
            )
        opened = open_dump(dump)
        assert [
            (one.site.at.rank, one.site.at.step, one.read().item()) for one in opened.tensors
        ] == [(0, 9, 1), (0, 10, 2), (1, 3, 4)]

    def test_graphs_are_named(self, dump: Path, token: Path) -> None:
        for name in ("Model_Prefill", "Model_Decoder"):
            (dump / "model" / "77").mkdir(parents=True, exist_ok=True)
            (dump / "model" / "77" / f"{name}.json").write_text("{}")
        assert open_dump(dump).provenance == {"topologies": "Model_Decoder, Model_Prefill"}

    def test_input_saved_before_and_after_is_changed_and_old_output_is_left_out(
        self, token: Path
    ) -> None:
        operation = token / "3_Cache"
        for when, value in (("before", 1), ("after", 2)):
            write_float(operation / when / "intensor0.bin", value)
            write_float(operation / when / "outtensor0.bin", value)
        assert contents(open_dump(token))[7:10] == [
            ("3_Cache:input.0", "Cache", 1),
            ("3_Cache:changed.0", "Cache", 2),
            ("3_Cache:output", "Cache", 2),
        ]

    def test_input_saved_only_after_is_an_input(self, token: Path) -> None:
        write_float(token / "3_Cache" / "after" / "inTensor0.bin", 2)
        assert contents(open_dump(token))[7] == ("3_Cache:input.0", "Cache", 2)

    def test_two_dumps_are_named(self, dump: Path, token: Path) -> None:
        write_float(dump.with_name("b") / "tensors/0_8/0/0_A/after/outtensor0.bin", 1)
        with pytest.raises(
            DumpError, match="holds several dumps; name one of them: b/tensors, msit"
        ):
            open_dump(dump.parent)

    def test_two_runs_of_one_device_are_named(self, dump: Path, token: Path) -> None:
        write_float(dump / "tensors/0_8/0/0_A/after/outtensor0.bin", 1)
        with pytest.raises(
            DumpError, match="several runs of one device; name one of them: 0_8, 0_77"
        ):
            open_dump(dump)

    def test_link_to_a_folder_is_refused(self, token: Path) -> None:
        (token / "1_Attention" / "1_Loop").symlink_to(token)
        with pytest.raises(UnreadableFileError, match="it is a symbolic link"):
            open_dump(token)

    def test_link_to_a_device_elsewhere_is_refused(self, tmp_path: Path, token: Path) -> None:
        (tmp_path / "other" / "tensors").mkdir(parents=True)
        (tmp_path / "other" / "tensors" / "0_77").symlink_to(token.parent)
        with pytest.raises(UnreadableFileError, match="it lies outside of the dump"):
            open_dump(tmp_path / "other")


class TestFile:
    @pytest.mark.parametrize(
        ("dtype", "values", "expected", "name"),
        [
            (FLOAT32, struct.pack("<2f", 1.5, -2), [1.5, -2.0], "float32"),
            (FLOAT16, struct.pack("<2e", 0.5, 4), [0.5, 4.0], "float16"),
            (BFLOAT16, b"\x80\x3f\x00\xc0", [1.0, -2.0], "bfloat16"),
            (INT8, b"\x01\xff", [1, -1], "int8"),
            (INT32, struct.pack("<2i", 7, -7), [7, -7], "int32"),
            (INT64, struct.pack("<2q", 7, -(2**40)), [7, -(2**40)], "int64"),
            (BOOL, b"\x00\x02", [False, True], "bool"),
        ],
    )
    def test_dtype(
        self, tmp_path: Path, dtype: int, values: bytes, expected: list[float], name: str
    ) -> None:
        value = only(write(tmp_path / "a.bin", values, "2", dtype))
        assert value.tolist() == expected
        assert value.dtype is getattr(torch, name)

    def test_dims_give_the_shape(self, tmp_path: Path) -> None:
        value = only(write(tmp_path / "a.bin", bytes(range(6)), "2,3", INT8))
        assert value.tolist() == [[0, 1, 2], [3, 4, 5]]

    @pytest.mark.parametrize(("dims", "shape"), [("", ()), ("1,1", (1, 1))])
    def test_one_value(self, tmp_path: Path, dims: str, shape: tuple[int, ...]) -> None:
        assert only(write(tmp_path / "a.bin", b"\x05", dims, INT8)).shape == shape

    def test_no_values(self, tmp_path: Path) -> None:
        assert only(write(tmp_path / "a.bin", b"", "0,4", FLOAT32)).shape == (0, 4)

    def test_one_file_is_the_output_of_the_model(self, tmp_path: Path) -> None:
        (tensor,) = open_dump(write_float(tmp_path / "intensor3.bin", 1)).tensors
        assert str(tensor.site) == "(model):output forward step 0"

    def test_values_may_be_changed_without_changing_the_file(self, tmp_path: Path) -> None:
        file = write(tmp_path / "a.bin", b"\x05", "1", INT8)
        only(file).zero_()
        assert only(file).tolist() == [5]

    def test_statistics(self, tmp_path: Path) -> None:
        file = tmp_path / "a.bin"
        lines = ("max=2.000000", "min=-1.500000", "mean=N/A", "l2norm=nan")
        file.write_bytes(header("2,3", FLOAT16, 0, *lines))
        dump = open_dump(file)
        (tensor,) = dump.tensors
        assert (tensor.dtype, tensor.shape) == ("float16", (2, 3))
        assert (tensor.statistics["max"], tensor.statistics["min"]) == (2.0, -1.5)
        assert set(tensor.statistics) == {"max", "min", "norm"}
        assert not tensor.has_values
        with pytest.raises(UnreadableFileError, match=r"a\.bin has no values"):
            tensor.read()

    def test_complex_statistics_are_left_out(self, tmp_path: Path) -> None:
        file = tmp_path / "a.bin"
        file.write_bytes(header("2", 16, 0, "max=(1.000000,2.000000)", "l2norm=3.000000"))
        assert open_dump(file).tensors[0].statistics == {"norm": 3.0}

    def test_unknown_dtype_has_a_shape_but_no_values(self, tmp_path: Path) -> None:
        (tensor,) = open_dump(write(tmp_path / "a.bin", b"\x12", "2", 29)).tensors
        assert (tensor.dtype, tensor.shape, tensor.has_values) == ("", (2,), False)


class TestLinks:
    def test_by_the_numbers_of_the_operations(self, token: Path) -> None:
        write_link(token / "2_Head" / "before" / "intensor0.bin", "1_0_outtensor0.bin")
        write_link(token / "2_Head" / "before" / "intensor1.bin", "1_0_intensor10.bin")
        assert contents(open_dump(token))[6:8] == [
            ("2_Head:input.0", "Head", 5),
            ("2_Head:input.1", "Head", 4),
        ]

    def test_by_path(self, token: Path) -> None:
        target = "../../1_Attention/after/outtensor0.bin"
        write_link(token / "2_Head" / "before" / "intensor0.bin", target)
        assert contents(open_dump(token))[6] == ("2_Head:input.0", "Head", 7)

    def test_symbolic_link_made_on_another_machine(self, token: Path) -> None:
        link = token / "2_Head" / "before" / "intensor0.bin"
        link.parent.mkdir()
        link.symlink_to("/data/msit_dump_1/tensors/0_77/0/1_Attention/after/outtensor0.bin")
        assert contents(open_dump(token))[6] == ("2_Head:input.0", "Head", 7)

    def test_dims_are_those_of_the_link(self, token: Path) -> None:
        file = token / "2_Head" / "before" / "intensor0.bin"
        write_link(file, "1_outtensor0.bin")
        file.write_bytes(file.read_bytes().replace(b"dims=1", b"dims=1,1"))
        opened = open_dump(token)
        assert opened.tensors[6].shape == opened.tensors[6].read().shape == (1, 1)

    def test_tensor_that_the_tool_filtered_out_has_no_values(self, token: Path) -> None:
        write_link(token / "2_Head" / "before" / "intensor0.bin", "intensor0.bin")
        assert not open_dump(token).tensors[6].has_values

    def test_single_file_follows_links_within_its_dump(self, token: Path) -> None:
        file = write_link(token / "2_Head" / "before" / "intensor0.bin", "1_0_outtensor0.bin")
        assert only(file).tolist() == [5.0]

    @pytest.mark.parametrize(
        ("target", "problem"),
        [
            ("/etc/passwd", "it lies outside of the dump"),
            ("../../../../../../../secret.bin", "it lies outside of the dump"),
            ("1_9_outtensor0.bin", "No such file"),
            ("outtensor0.bin", "No such file"),
            ("a\0b", "null byte"),
            ("../../1_Attention", "it is a folder"),
        ],
    )
    def test_link_that_leads_nowhere_is_one_error(
        self, token: Path, target: str, problem: str
    ) -> None:
        write_link(token / "2_Head" / "before" / "intensor0.bin", target)
        assert problem in first_problem(token)

    def test_link_to_a_file_of_other_length_is_refused(self, token: Path) -> None:
        write(token / "1_Attention" / "after" / "outtensor2.bin", b"\1", "1", INT8)
        write_link(token / "2_Head" / "before" / "intensor0.bin", "1_outtensor2.bin")
        assert "has 1 bytes, dims and dtype need 4" in first_problem(token)

    def test_loop_of_links_is_refused(self, token: Path) -> None:
        folder = token / "2_Head" / "before"
        write_link(folder / "intensor0.bin", "intensor1.bin")
        write_link(folder / "intensor1.bin", "../before/intensor0.bin")
        assert "its links form a loop" in first_problem(token)

    def test_loop_of_symbolic_links_is_refused(self, token: Path) -> None:
        link = token / "2_Head" / "before" / "intensor0.bin"
        link.parent.mkdir()
        link.symlink_to("intensor0.bin")
        assert "its links form a loop" in first_problem(token)


GOOD = header("2,3", FLOAT16, 12, "$Object.data=0,12") + bytes(12)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (GOOD.replace(b"$End=1\n", b""), "does not belong to a header|no \\$End"),
        (GOOD[:40], "no \\$End in its first 40 bytes"),
        (b"$Version=1.0\n" + b"a=b\n" * 10_000, "no \\$End in its first 4,096 bytes"),
        (b"$Version=" + b"1" * 10_000, "no \\$End in its first 4,096 bytes"),
        (GOOD.replace(b"dims=2,3", b"dims=-2,-3"), "dims is not a size: '-2'"),
        (GOOD.replace(b"dims=2,3", b"dims=2,,3"), "dims is not a size: ''"),
        (GOOD.replace(b"dims=2,3\n", b""), "dims is not a size: '-'"),
        (GOOD.replace(b"dims=2,3", b"dims=" + b"9" * 30), "dims is not a size"),
        (GOOD.replace(b"dims=2,3", b"dims=2,4"), "has 12 bytes, dims and dtype need 16"),
        (GOOD.replace(b"dtype=1", b"dtype=0"), "has 12 bytes, dims and dtype need 24"),
        (GOOD.replace(b"=0,12", b"=0,"), "\\$Object.data is not a size: ''"),
        (GOOD.replace(b"=0,12", b"=-1,12"), "\\$Object.data is not a size: '-1'"),
        (
            GOOD.replace(b"=0,12", b"=4,12"),
            "\\$Object.data ends at byte 16, \\$Object.Length is 12",
        ),
        (GOOD.replace(b"Length=12", b"Length=13"), "\\$Object.Length is 13, and the file holds 12"),
        (GOOD.replace(b"Length=12", b"Length=x"), "\\$Object.Length is not a size: 'x'"),
        (GOOD[:-1], "\\$Object.Length is 12, and the file holds 11"),
        (GOOD + GOOD, "\\$Object.Length is 12, and the file holds 122"),
        (GOOD.replace(b"format=2", b"format=\xe9"), "does not belong to a header"),
        (
            header("2500000000", FLOAT32, 10**10, f"$Object.data=0,{10**10}") + bytes(900),
            "\\$Object.Length is 10,000,000,000, and the file holds 900",
        ),
        (
            header(",".join(["9" * 18] * 100), FLOAT32, 12, "$Object.data=0,12") + bytes(12),
            "dims and dtype need",
        ),
    ],
)
def test_hostile_file_is_one_error_that_names_file_and_key(
    tmp_path: Path, content: bytes, problem: str
) -> None:
    file = tmp_path / "a.bin"
    file.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UnreadableFileError, match=problem) as caught:
        open_dump(file, "atb")
    assert str(caught.value).startswith(f"{file}: ")
    assert len(str(caught.value)) < len(str(file)) + 310
    assert "\n" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_file_that_became_shorter_is_one_error(tmp_path: Path) -> None:
    file = write(tmp_path / "a.bin", bytes(4), "1", FLOAT32)
    dump = open_dump(file)
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(UnreadableFileError, match="the file holds 2"):
        dump.tensors[0].read()


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["fifo", "folder"])
def test_tensor_that_is_not_a_file_is_one_error(
    token: Path, make: Callable[[Path], object]
) -> None:
    make(token / "2_Head" / "after" / "outtensor1.bin")
    assert re.search(r"outtensor1\.bin: it is a .*, not a file", first_problem(token))


def test_fifo_is_not_a_dump(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.bin")
    with pytest.raises(DumpError, match="is not a dump of a known format"):
        open_dump(tmp_path / "a.bin")


def test_operation_named_in_latin_1_is_refused(token: Path) -> None:
    write_float(token / os.fsdecode(b"3_caf\xe9") / "after" / "outtensor0.bin", 1)
    assert "its name is not UTF-8" in first_problem(token)
