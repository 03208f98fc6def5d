"""Reads the files that say which machines there are."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from assay.errors import UsageError
from assay.files import read_toml
from assay_runners.fleet.entries import Fleet, GitHub, Vendor

RUNNERS_FILE = Path("runners/runners.toml")
GITHUB_FILE = Path("runners/github.toml")

_Table = TypeVar("_Table", bound=BaseModel)


def read_fleet(root: Path) -> Fleet:
    """What the two files below `root` say.

    Raises: UsageError with the file, and a line for each table and field that is wrong.
    """
    github = _validated(GitHub, _read_toml(root / GITHUB_FILE), root / GITHUB_FILE)
    vendors = []
    for name, table in _read_toml(root / RUNNERS_FILE).items():
        if not isinstance(table, dict):
            raise UsageError(f"{root / RUNNERS_FILE}: {name} stands outside of a vendor's table")
        vendors.append(
            _validated(Vendor, {"name": name, **table}, root / RUNNERS_FILE, f" [{name}]")
        )
    if not vendors:
        raise UsageError(f"{root / RUNNERS_FILE} has no vendor")
    _require_own_names(vendors, root / RUNNERS_FILE)
    return Fleet(github=github, vendors=tuple(vendors))


def _require_own_names(vendors: Sequence[Vendor], file: Path) -> None:
    """Raises: UsageError if two vendors are called alike: a label could mean either."""
    owners: dict[str, str] = {}
    for vendor in vendors:
        for name in (vendor.name, *vendor.also_called):
            if name in owners:
                raise UsageError(
                    f"{file}: [{vendor.name}] is called {name!r}, and so is [{owners[name]}]"
                )
            owners[name] = vendor.name


def _read_toml(file: Path) -> dict[str, Any]:
    if not file.exists():
        raise UsageError(f"{file}: no such file; name a checkout of assay with --root")
    return read_toml(file)


def _validated(model: type[_Table], table: dict[str, Any], file: Path, name: str = "") -> _Table:
    try:
        return model.model_validate(table)
    except ValidationError as error:
        known = sorted({str(one["loc"][-1]) for one in error.errors() if one["type"] == "missing"})
        known += list(model.model_fields)
        # A list none of whose entries is right is told as too short as well.
        wrong = [one for one in error.errors() if one["type"] != "too_short"] or error.errors()
        lines = [f"{file}{name}: {_in_words(one, known)}" for one in wrong]
        raise UsageError("\n".join(lines)) from None


def _in_words(error: Mapping[str, Any], known: list[str]) -> str:
    """One mistake: where it is in the table, and what is wrong, in the words of TOML.

    known: the fields that a name which is none may have meant.
    """
    place = [f"[{part + 1}]" if isinstance(part, int) else str(part) for part in error["loc"]]
    field = ".".join(place).replace(".[key]", "").replace(".[", "[")
    told = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        nearest = get_close_matches(str(error["loc"][-1]), known, n=1)
        told = f"there is no such field{f'; nearest is {nearest[0]}' if nearest else ''}"
    elif error["type"] == "missing":
        told = "it is missing"
    else:
        told = _OF_TOML.get(error["type"], told)
    return f"{field}: {told}" if field else told


_OF_TOML = {
    "tuple_type": "it has to be an array: [...]",
    "model_type": "it has to be a table: { ... }",
    "dict_type": "it has to be a table: { ... }",
    "string_type": 'it has to be a string: "..."',
    "int_type": "it has to be a whole number, without quotes",
}
