"""Text of others in a terminal, a log, Markdown and JSON."""

import json
import re
import unicodedata

import pytest

from assay.foreign_text import (
    escape_cell,
    escape_characters,
    escape_controls,
    escape_markdown,
    escape_output,
    markdown_block,
    markdown_code,
    one_line,
)

POISON = "\x1b[2J\x07\x9b\u202e\u2066\u200b\ufeff\u2028\u0085\r\x00\U000e0041\ud800"


def dangerous(text: str) -> list[str]:
    """Characters that move the cursor, turn the writing direction or cannot be seen."""
    bad = ("Cc", "Zl", "Zp", "Cs")
    hidden = "\u200b\u200e\u200f\u061c\ufeff\u2060\u2066\u202e\U000e0041"
    return [c for c in text if (unicodedata.category(c) in bad and c not in "\n\t") or c in hidden]


@pytest.mark.parametrize("escape", [escape_controls, escape_output, one_line, escape_markdown])
def test_no_control_character_remains(escape: object) -> None:
    assert callable(escape)
    assert dangerous(POISON)
    assert dangerous(escape(f"a{POISON}b")) == []


@pytest.mark.parametrize(
    "start", ["=", "+", "-", "@", " =", "\uff1d", "\uff0b", "\uff0d", "\uff20"]
)
def test_a_cell_is_no_formula(start: str) -> None:
    assert escape_cell(f"{start}cmd|' /C calc'!A0") == f"'{start}cmd|' /C calc'!A0"


@pytest.mark.parametrize("text", ["", "model.norm", "a=1", "[1, 2]", "1-2"])
def test_other_cells_are_unchanged(text: str) -> None:
    assert escape_cell(text) == text


def test_a_cell_has_one_line() -> None:
    assert escape_cell("\t=1\n") == r"\t=1\n"


def test_newlines_are_kept_or_shown() -> None:
    assert escape_controls("a\n\tb") == "a\n\tb"
    assert one_line("a\n\tb") == r"a\n\tb"


def test_ordinary_text_of_all_scripts_is_kept() -> None:
    text = "naïve Ελλάδα 日本語 עברית हिन्दी 👩\u200d💻 ✓ — «»\u00a0\u200cx"
    assert one_line(text) == text
    assert escape_output(text) == text


@pytest.mark.parametrize(
    "line",
    [
        "::error::x",
        "  ::set-output name=a::b",
        "ok\n::stop-commands::x",
        "ok\r\n\t::add-mask::x",
        "a ##[error]x",
        "\u2028::error::x",
    ],
)
def test_no_line_is_a_command_of_a_ci_system(line: str) -> None:
    shown = escape_output(line)
    assert not any(part.strip().startswith("::") for part in re.split(r"[\n\r]", shown))
    assert "##[" not in shown


def test_two_colons_within_a_line_are_kept() -> None:
    assert escape_output("test_file.py::test_name") == "test_file.py::test_name"


def test_escaped_json_is_the_same_json() -> None:
    value = {"a": POISON[:-1] + "::x ##[y] \U0001f600", "::b": ["##[c]"]}
    text = json.dumps(value, ensure_ascii=False, indent=1)
    assert json.loads(escape_output(text)) == value
    assert json.loads(f'"{escape_characters("é✓😀")}"') == "é✓😀"


def test_escaping_twice_changes_nothing() -> None:
    once = escape_output(f"::x {POISON} ##[y]")
    assert escape_output(once) == once


@pytest.mark.parametrize(
    "text",
    [
        "@maintainer",
        "fixes #1",
        "GH-12",
        "owner/repo#3",
        "https://example.org/x",
        "www.example.org",
        "<img src=x onerror=y>",
        "[text](javascript:x)",
        "![image](x)",
        "a | b",
        "`code`",
        "# title",
        "**bold**",
        "~~gone~~",
        "line\n\n- item",
    ],
)
def test_markdown_does_nothing(text: str) -> None:
    shown = escape_markdown(text)
    assert "\n" not in shown
    plain = shown.replace("<!-- -->", "\0")
    assert not re.search(r"@\w|#\d|GH-\d|://|www\.\w|<\w", plain)
    assert not re.search(r"(?<!\\)[`*|~\[\]]", plain)


def test_markdown_code_cannot_be_left() -> None:
    assert markdown_code("a ` b | c\n@x") == "`a ' b \\| c @x`"
    assert markdown_code("") == "` `"
    assert markdown_block("a\n````\n<b>").split("\n")[0] == "`````text"
