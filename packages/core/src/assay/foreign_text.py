r"""Escaping of foreign text: names in models and files, messages, values of records.

Every output format escapes with these functions. A character that moves the cursor, changes the writing
direction or is invisible is replaced by its JSON escape, such as `\u001b`, so that escaped JSON keeps
its meaning.
"""

import re

# C0 and C1 controls and DEL; marks, overrides and isolates of the writing direction; separators of
# lines and paragraphs; invisible characters; lone surrogates; tags.
# Sources: Unicode 16, categories Cc, Zl, Zp, Cs; UAX 9, table 1; UTS 36, section 3.
_CONTROLS = (
    "\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f"
)
_CONTROL = re.compile(f"[{_CONTROLS}]")
_CONTROL_IN_LINES = re.compile(f"[{_CONTROLS}]".replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))

# GitHub's runner takes `::` at the start of a line, and `##[` anywhere in one, for a command.
# Source: actions/runner, src/Runner.Common/ActionCommand.cs.
_WORKFLOW_COMMAND = re.compile(r"^(\s*):(?=:)|#(?=#\[)", re.MULTILINE)

_MARKDOWN = re.compile(r"[\\`*{}\[\]#|~]|(?<![^\W_])_+|_+(?![^\W_])")  # `_` within a word is text
# GitHub makes links of `@name`, `#1`, `GH-1` and addresses after it removes backslashes. An empty
# comment inside prevents that, and is not shown.
# Source: GitHub Docs, "Autolinked references and URLs".
_MARKDOWN_LINK = re.compile(r"(@(?=\w)|#(?=\d)|\bGH-(?=\d)|:(?=//)|\bwww(?=\.))", re.IGNORECASE)
_NOTHING_SHOWN = "<!-- -->"

# A spreadsheet takes a cell that begins with one of these for a formula, which can run programs.
# Full-width signs work in some languages.
# Source: OWASP, "CSV Injection".
_FORMULA_STARTS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def shorten(text: object, longest: int = 300) -> str:
    """Put text into one line of at most `longest` characters, for a message that quotes it."""
    line = " ".join(str(text).split())
    return line if len(line) <= longest else f"{line[:longest]}..."


def escape_controls(text: str) -> str:
    """Escape all control characters but newlines and tabs."""
    return _CONTROL_IN_LINES.sub(_escape, text)


def one_line(text: str) -> str:
    r"""Escape all control characters.

    >>> one_line("a" + chr(10) + "b") == "a" + chr(92) + "nb"
    True
    """
    return _CONTROL.sub(_escape, text)


def escape_cell(text: str) -> str:
    """Escape text for a cell of a CSV file, so that a spreadsheet shows it and computes nothing.

    >>> escape_cell("=1+1")
    "'=1+1"
    """
    line = one_line(text)
    return f"'{line}" if line.lstrip().startswith(_FORMULA_STARTS) else line


def escape_output(text: str) -> str:
    """Escape control characters and commands of CI systems in text for a terminal or a log."""
    return _WORKFLOW_COMMAND.sub(_escape_command, escape_controls(text))


def escape_markdown(text: str) -> str:
    """Escape text for a line of Markdown on GitHub, so that it is shown but has no effect."""
    line = one_line(" ".join(text.split()))
    escaped = _MARKDOWN.sub(lambda found: "".join(f"\\{letter}" for letter in found[0]), line)
    escaped = escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN_LINK.sub(rf"\1{_NOTHING_SHOWN}", escaped)


def markdown_code(text: str) -> str:
    """Show text as code within a line or a table cell of Markdown."""
    shown = one_line(" ".join(text.split())).replace("`", "'").replace("|", "\\|")
    return f"`{shown or ' '}`"


def markdown_block(text: str) -> str:
    """Show text as a block of code in Markdown."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{escape_output(text)}\n{fence}"


def escape_characters(text: str) -> str:
    r"""Escape every character, as in `\u2713` for a check mark."""
    return "".join(map(_escaped, text))


def _escape(found: re.Match[str]) -> str:
    return _escaped(found[0])


def _escaped(letter: str) -> str:
    if letter in _SHORT:
        return _SHORT[letter]
    units = letter.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[start : start + 4]}" for start in range(0, len(units), 4))


_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def _escape_command(found: re.Match[str]) -> str:
    command = found[0]
    return f"{command[:-1]}{_escaped(command[-1])}"
