"""Reads the two files that describe the machines."""

from collections.abc import Mapping
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
    """Read the two files below `root`.

    Raises: UsageError with a line for each wrong table and field.
    """
    github = validate_entry(GitHub, _read_toml(root / GITHUB_FILE), root / GITHUB_FILE)
    return Fleet(github=github, vendors=tuple(read_vendors(root / RUNNERS_FILE)))


def read_vendors(file: Path) -> list[Vendor]:
    """Read the vendors of one file. Raises: as `read_fleet`."""
    vendors = []
    for name, table in _read_toml(file).items():
        if not isinstance(table, dict):
            raise UsageError(f"{file}: {name} is outside of a vendor's table")
        vendors.append(validate_entry(Vendor, {"name": name, **table}, file, f" [{name}]"))
    if not vendors:
        raise UsageError(f"{file} has no vendor")
    return vendors


def _read_toml(file: Path) -> dict[str, Any]:
    if not file.exists():
        raise UsageError(f"{file}: no such file; name a checkout of assay with --root")
    return read_toml(file)


def validate_entry(
    model: type[_Table], table: dict[str, Any], file: Path, name: str = ""
) -> _Table:
    """Make an entry. Raises: UsageError with a line for each wrong field."""
    try:
        return model.model_validate(table)
    except ValidationError as error:
        known = sorted({str(one["loc"][-1]) for one in error.errors() if one["type"] == "missing"})
        known += list(model.model_fields)
        # pydantic also reports a list without valid entries as too short.
        wrong = [one for one in error.errors() if one["type"] != "too_short"] or error.errors()
        lines = [f"{file}{name}: {_describe_error(one, known)}" for one in wrong]
        raise UsageError("\n".join(lines)) from None


def _describe_error(error: Mapping[str, Any], known: list[str]) -> str:
    """Describe one mistake, its place and its problem, in terms of TOML.

    known: the field names to suggest for an unknown one.
    """
    place = [f"[{part + 1}]" if isinstance(part, int) else str(part) for part in error["loc"]]
    field = ".".join(place).replace(".[key]", "").replace(".[", "[")
    problem = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        nearest = get_close_matches(str(error["loc"][-1]), known, n=1)
        problem = f"there is no such field{f'; nearest is {nearest[0]}' if nearest else ''}"
    elif error["type"] == "missing":
        problem = "it is missing"
    else:
        problem = _TOML_PROBLEMS.get(error["type"], problem)
    return f"{field}: {problem}" if field else problem


_TOML_PROBLEMS = {
    "tuple_type": "it has to be an array: [...]",
    "model_type": "it has to be a table: { ... }",
    "dict_type": "it has to be a table: { ... }",
    "string_type": 'it has to be a string: "..."',
    "int_type": "it has to be a whole number, without quotes",
}
