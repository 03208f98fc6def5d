"""Edits a checkout for another repository, other vendors or another server."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from assay.devices.vendor_names import find_vendor_name
from assay.errors import UsageError
from assay.files import read_text
from assay_runners.fleet.entries import Fleet, GitHub
from assay_runners.fleet.reading import (
    GITHUB_FILE,
    RUNNERS_FILE,
    read_fleet,
    read_vendors,
    validate_entry,
)
from assay_runners.rendering.files import write_rendered

# The files that name the repository, its owner, its runner group or its own actions.
_NAMING_FILES = (
    ".github/CODEOWNERS",
    ".github/*/*.yml",
    "examples/events/*.json",
    "examples/other_repository/.github/workflows/*.yml",
    "docs/runners.md",
)
# zizmor advises "$/", which GitHub Enterprise Server does not know.
_ZIZMOR_FILE = Path(".github/zizmor.yml")
_ZIZMOR_CONFIGURATION = "rules:\n  self-repository:\n    disable: true\n"
# GitHub Enterprise Server has no artifacts of version 4: https://github.com/actions/upload-artifact#v4---whats-new
_OLD_ARTIFACTS = {
    r"(?<=/upload-artifact@).*": "c6a366c94c3e0affe28c06c8df20a878f24da3cf # v3.2.2",
    r"(?<=/download-artifact@).*": "a9bc5e6ef2cb54c177f32aa5726adaa15e7e2d59 # v3.1.0",
}
_ON_A_BRANCH = " # zizmor: ignore[unpinned-uses] the branch is the boundary"
_RUNNER_LINE = re.compile(r"^ *\{ cards = (\d+),.*\n", re.MULTILINE)
_SESSIONS = re.compile(r"sessions = \[.*?\]")


def initialize(
    root: Path,
    vendors: Sequence[str],
    cards: Mapping[str, Sequence[int]],
    settings: Mapping[str, str],
) -> tuple[Fleet, list[str]]:
    """Write the settings, the chosen vendors, and everything that depends on them.

    vendors: the entries of runners.toml to keep.
    cards: the numbers of cards by vendor; other vendors keep theirs.
    settings: new values of github.toml.
    Returns: the new fleet, and the removed vendors.
    Raises: UsageError, before anything is written, if a value is wrong or a vendor has no entry.
    """
    old = read_fleet(root)
    table = {**old.github.model_dump(), **settings}
    new = validate_entry(GitHub, table, Path("assay runners init"))
    entries = _choose_entries(
        read_text(root / RUNNERS_FILE),
        list(map(find_vendor_name, vendors)),
        {find_vendor_name(name): numbers for name, numbers in cards.items()},
    )
    with TemporaryDirectory() as folder:
        tried = Path(folder, RUNNERS_FILE.name)
        tried.write_text(entries, encoding="utf-8")
        try:
            kept = Fleet(github=new, vendors=tuple(read_vendors(tried)))
        except UsageError as error:
            raise UsageError(str(error).replace(str(tried), "assay runners init")) from None
    edits = _list_edits(old.github, new)
    targets = [runner.target for runner in kept.runners()]
    if gone := [one.target for one in old.runners() if one.target not in targets]:
        places = '(?<=default: )|(?<="vendor": ")|(?<="vendors": ")'
        edits[rf'({places})[^"\n]*\b({"|".join(gone)})\b[^"\n]*'] = targets[0]
    named = (file for pattern in _NAMING_FILES for file in sorted(root.glob(pattern)))
    texts = {file: _edit(read_text(file), edits) for file in named}
    texts[root / GITHUB_FILE] = _with_settings(read_text(root / GITHUB_FILE), settings)
    texts[root / RUNNERS_FILE] = entries
    if new.is_enterprise_server:
        texts[root / _ZIZMOR_FILE] = _ZIZMOR_CONFIGURATION
    else:
        (root / _ZIZMOR_FILE).unlink(missing_ok=True)
    for file, text in texts.items():
        file.write_text(text, encoding="utf-8", newline="\n")
    write_rendered(root, kept)
    names = {vendor.name for vendor in kept.vendors}
    return kept, [vendor.name for vendor in old.vendors if vendor.name not in names]


def read_cards(options: Sequence[str]) -> dict[str, list[int]]:
    """Read options such as "nvidia=1,4". Raises: UsageError."""
    cards = {}
    for option in options:
        if not re.fullmatch(r"\w+=\d+(,\d+)*", option):
            raise UsageError(f"--cards {option}: write VENDOR=NUMBERS, such as nvidia=1,4")
        name, _, numbers = option.partition("=")
        cards[name] = sorted(map(int, numbers.split(",")))
    return cards


def _list_edits(old: GitHub, new: GitHub) -> dict[str, str]:
    """List the patterns and the new texts of the files that name a setting."""
    on_a_branch = _ON_A_BRANCH if "@" in new.check_action else ""
    return {
        r"(?<=- uses: )\S+/actions/check\b.*": f"{new.check_action}{on_a_branch}",
        r"(?<=uses: )[$.]/(?=\.github/)": new.own,
        # Except where the original is cloned.
        rf"(?<!clone https://github\.com/)\b{re.escape(old.repository)}\b": new.repository,
        rf"@{re.escape(old.organization)}/": f"@{new.organization}/",
        rf'(?<="login": "){re.escape(old.organization)}(?=")': new.organization,
        rf"(?<=group: ){re.escape(old.runner_group)}$": new.runner_group,
        **(_OLD_ARTIFACTS if new.is_enterprise_server else {}),
    }


def _edit(text: str, edits: Mapping[str, str]) -> str:
    for pattern, new in edits.items():
        text = re.sub(pattern, _as_replacement(new), text, flags=re.MULTILINE)
    return text


def _as_replacement(text: str) -> str:
    """Escape a text for `re.sub`, which reads a backslash as the start of an escape."""
    return text.replace("\\", r"\\")


def _with_settings(text: str, settings: Mapping[str, str]) -> str:
    """Return github.toml with these values, the ones that it lacks at its end."""
    for name, value in settings.items():
        line = f"{name} = {json.dumps(value)}"
        text, count = re.subn(f"(?m)^{name} = .*$", _as_replacement(line), text)
        text += "" if count else f"{line}\n"
    return text


def _choose_entries(text: str, vendors: Sequence[str], cards: Mapping[str, Sequence[int]]) -> str:
    """Return the head of runners.toml, and the entries of the chosen vendors in its order."""
    head, *parts = re.split(r"^(?=\[\w)", text, flags=re.MULTILINE)
    entries = {part[1 : part.index("]")]: part for part in parts}
    for name in vendors:
        if name not in entries:
            raise UsageError(
                f"{RUNNERS_FILE} has no vendor {name}; it has {', '.join(entries)}. The file's history"
                " has the entries that an earlier `init` removed"
            )
    for name in cards:
        if name not in vendors:
            raise UsageError(f"--cards {name}=...: also name the vendor with --vendor {name}")
    kept = [
        _with_cards(entry, cards[name]) if name in cards else entry
        for name, entry in entries.items()
        if name in vendors
    ]
    return head + "".join(kept).rstrip("\n") + "\n"


def _with_cards(entry: str, numbers: Sequence[int]) -> str:
    """Return the entry with a line for each number of cards, a copy of the line with the nearest.

    The fewest cards get all sessions: the vendor's machines would lose `bench`, which only they run.
    """
    lines = {int(found[1]): found[0] for found in _RUNNER_LINE.finditer(entry)}

    def make(number: int) -> str:
        nearest = min(lines, key=lambda known: abs(known - number))
        line = lines[nearest].replace(f"cards = {nearest},", f"cards = {number},")
        if number > min(numbers):
            return line
        return _SESSIONS.sub(max(_SESSIONS.findall("".join(lines.values())), key=len), line)

    before, after = entry.split("".join(lines.values()))
    return before + "".join(map(make, numbers)) + after
