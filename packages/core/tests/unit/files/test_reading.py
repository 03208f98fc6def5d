"""Readers of foreign files: every hostile file is one error of one line."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field

from assay.files import (
    UnreadableFileError,
    file_digest,
    read_bytes,
    read_json,
    read_json_lines,
    read_json_object,
    read_lines,
    read_record,
    read_text,
    read_toml,
    refuse_link,
)
from assay.files import reading as reading_module


class Point(BaseModel):
    x: int


READERS: list[Callable[[Path], Any]] = [
    read_bytes,
    read_text,
    read_json,
    read_json_object,
    read_toml,
    lambda path: list(read_lines(path)),
    lambda path: list(read_json_lines(path)),
    lambda path: read_record(Point, path),
]
NAMES = ["bytes", "text", "json", "object", "toml", "lines", "json-lines", "record"]


def refusal(read: Callable[[Path], Any], path: Path) -> str:
    with pytest.raises(UnreadableFileError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}")
    assert "\n" not in message
    assert len(message) < len(str(path)) + 400
    return message


@pytest.mark.parametrize("read", READERS, ids=NAMES)
class TestEveryReader:
    def test_refuses_an_absent_file(self, read: Callable[[Path], Any], tmp_path: Path) -> None:
        assert refusal(read, tmp_path / "x").endswith("No such file or directory")

    def test_refuses_a_fifo_at_once(self, read: Callable[[Path], Any], tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "x")
        assert refusal(read, tmp_path / "x").endswith("a FIFO, a socket or a device, not a file")

    def test_refuses_a_device(self, read: Callable[[Path], Any], tmp_path: Path) -> None:
        (tmp_path / "x").symlink_to("/dev/zero")
        assert refusal(read, tmp_path / "x").endswith("a FIFO, a socket or a device, not a file")

    def test_refuses_a_folder(self, read: Callable[[Path], Any], tmp_path: Path) -> None:
        assert refusal(read, tmp_path).endswith("it is a folder, not a file")

    def test_refuses_a_path_that_no_file_can_have(
        self, read: Callable[[Path], Any], tmp_path: Path
    ) -> None:
        assert "embedded null byte" in refusal(read, tmp_path / "a\0b")
        assert "File name too long" in refusal(read, tmp_path / ("a" * 300))


@pytest.mark.parametrize("read", READERS[:5], ids=NAMES[:5])
def test_a_large_file_is_refused_before_it_is_parsed(
    read: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_module, "MAX_TOML_BYTES", 1 << 20)
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)
    assert "it is larger than" in refusal(read, path)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (read_json, "[" * 200 + "]" * 200),
        (read_json, '{"a":' * 200 + "1" + "}" * 200),
        (read_json, "[" * 200_000),
        (read_toml, "a = " + "[" * 200 + "]" * 200),
        (read_toml, "a = " + "[" * 100_000),
        (read_toml, ".".join("a" * 200) + " = 1"),
        (lambda path: list(read_json_lines(path)), '{"a":' + "[" * 150 + "]" * 150 + "}"),
    ],
    ids=["lists", "objects", "unclosed", "toml", "toml-unclosed", "toml-keys", "line"],
)
def test_deep_nesting_is_refused(read: Callable[[Path], Any], text: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(text)
    assert "nested deeper than 100 levels" in refusal(read, tmp_path / "x")


def test_a_key_of_many_parts_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("a." * 400_000 + "a = 1")  # takes tomllib an hour
    assert "nested deeper than 100 levels" in refusal(read_toml, tmp_path / "x")


def test_many_dots_in_values_and_comments_are_read(tmp_path: Path) -> None:
    text = "# " + "." * 300 + f"\na = [{', '.join(['0.5'] * 300)}]\nb = '{'.' * 300}'\n"
    (tmp_path / "x").write_text(text)
    assert read_toml(tmp_path / "x")["a"] == [0.5] * 300


@pytest.mark.parametrize("read", [read_json, lambda path: read_record(Point, path)])
@pytest.mark.parametrize(("part", "count"), [("[],", 4 << 20), ("0,", 17 << 20)])
def test_more_values_than_memory_holds_are_refused(
    read: Callable[[Path], Any], part: str, count: int, tmp_path: Path
) -> None:
    (tmp_path / "x").write_text('{"x": [' + part * count + "0]}")
    assert "it holds more than 16,777,216 values" in refusal(read, tmp_path / "x")


def test_half_of_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text(r'["\ud83d\ude00"]')
    assert read_json(tmp_path / "x") == ["\N{GRINNING FACE}"]
    (tmp_path / "x").write_text(r'{"\uD83D": 1}')
    assert "surrogates not allowed" in refusal(read_json, tmp_path / "x")


def test_an_error_of_the_disk_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to("/proc/self/mem")  # reading its first byte fails
    assert "Input/output error" in refusal(read_bytes, tmp_path / "x")
    with pytest.raises(UnreadableFileError, match="Input/output error"):
        file_digest(tmp_path / "x")


def test_nesting_within_the_limit_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("[" * 100 + "]" * 100 + " " * 200)
    assert read_json(tmp_path / "x") is not None


@pytest.mark.parametrize(
    ("read", "data", "problem"),
    [
        (read_json, b"{", "not JSON: Expecting property name"),
        (read_json, b"1" * 5000, "not JSON: Exceeds the limit"),
        (read_json, b"\xff", "not UTF-8 at byte 0"),
        (read_json_object, b"[]", "not a JSON object"),
        (read_toml, b"a = ", "Invalid value"),
        (read_toml, b"a = my", "Invalid value (at line 1, column 5); a text needs quotes"),
        (
            lambda path: read_record(Point, path),
            b'{"x": "y"}',
            "x: it must be a whole number",
        ),
        (lambda path: read_record(Point, path), b"[" * 5000, "Invalid JSON"),
    ],
    ids=["cut", "digits", "utf8", "list", "toml", "quotes", "field", "record"],
)
def test_broken_content_is_named(
    read: Callable[[Path], Any], data: bytes, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "x").write_bytes(data)
    assert problem in refusal(read, tmp_path / "x")


def test_lines_end_at_newlines_alone(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes("a\u2028b\u0085c\x0bd\x0ce\rf\n\n \ng".encode())
    assert list(read_lines(path)) == [(1, "a\u2028b\u0085c\x0bd\x0ce\rf\n"), (4, "g")]


def test_a_broken_line_is_named_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "x").write_text('{"a": 1}\n\n{"a": \n')
    assert refusal(lambda path: list(read_json_lines(path)), tmp_path / "x").startswith(
        f"{tmp_path / 'x'}, line 3: not JSON"
    )


def test_a_long_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_module, "MAX_LINE_BYTES", 1 << 20)
    (tmp_path / "x").write_bytes(b"a" * ((1 << 20) + 1))
    assert "the line is longer than 1 MiB" in refusal(lambda p: list(read_lines(p)), tmp_path / "x")


def test_a_link_in_the_folder_of_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to(tmp_path / "y")
    with pytest.raises(UnreadableFileError, match="it is a symbolic link"):
        refuse_link(tmp_path / "x")
    assert refuse_link(tmp_path / "z") == tmp_path / "z"


class Shape(BaseModel, extra="forbid"):
    points: dict[str, list[Point] | None]
    line_width: int = Field(1, alias="line-width")


class Point2(Point, extra="forbid"):
    y: int


class Drawing(BaseModel, extra="forbid"):
    shapes: list[Shape] = []
    corners: dict[str, list[Point2] | None] = {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"shape": []}', "unknown key 'shape'; did you mean shapes?"),
        ('{"shape": [{}]}', "unknown table 'shape'; did you mean shapes?"),
        ('{"zzz": 1}', "unknown key 'zzz'; known: shapes, corners"),
        # The misspelling also leaves `points` out.
        (
            '{"shapes": [{"point": {}}]}',
            "shapes, entry 1: unknown table 'point'; did you mean points?",
        ),
        (
            '{"shapes": [{"points": {}, "linewidth": 2}]}',
            "shapes, entry 1: unknown key 'linewidth'; did you mean line-width?",
        ),
        (
            '{"corners": {"left": [{"x": 1, "y": 2, "yy": 3}]}}',
            "corners.left, entry 1: unknown key 'yy'; did you mean y?",
        ),
    ],
)
def test_unknown_key_is_named_with_the_nearest_known_one(
    text: str, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "x").write_text(text)
    assert refusal(lambda path: read_record(Drawing, path), tmp_path / "x").endswith(problem)
