"""Reads the files that say which machines there are."""

import tomllib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from assay.errors import UsageError
from assay_runners.fleet.entries import Fleet, GitHub, Vendor

RUNNERS_FILE = Path("runners/runners.toml")
GITHUB_FILE = Path("runners/github.toml")

_Table = TypeVar("_Table", bound=BaseModel)


def read_fleet(root: Path) -> Fleet:
    """What the two files below `root` say.

    Raises: UsageError with the file, the table and the field, for the first thing that is wrong.
    """
    github = _validated(GitHub, _read_toml(root / GITHUB_FILE), root / GITHUB_FILE, "")
    vendors = []
    for name, table in _read_toml(root / RUNNERS_FILE).items():
        if not isinstance(table, dict):
            raise UsageError(f"{root / RUNNERS_FILE}: {name} stands outside of a vendor's table")
        vendors.append(_validated(Vendor, {"name": name, **table}, root / RUNNERS_FILE, f"{name}."))
    if not vendors:
        raise UsageError(f"{root / RUNNERS_FILE} has no vendor")
    return Fleet(github=github, vendors=tuple(vendors))


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{file}: no such file; name a checkout of assay with --root") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error


def _validated(model: type[_Table], table: dict[str, Any], file: Path, prefix: str) -> _Table:
    try:
        return model.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        field = prefix + ".".join(map(str, first["loc"]))
        raise UsageError(f"{file}: {field.rstrip('.')}: {first['msg']}") from None
