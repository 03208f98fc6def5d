"""Which vendors a matrix can be planned for, and what their cards lack."""

from functools import cache
from pathlib import Path
from typing import Any

from assay.errors import UsageError
from assay.files import read_toml
from assay_smoke.matrix.rules import RULES, Rule, refusing

# The vendor of machines without an accelerator: cases there share the host's cores.
HOST = "cpu"

_FILE = Path(__file__).with_name("vendors.toml")


class UnknownVendorError(UsageError):
    """A vendor that no file names."""

    @classmethod
    def of(cls, vendor: str) -> "UnknownVendorError":
        """`vendor`: as the user wrote it."""
        return cls(f"--vendor {vendor}: there is {', '.join(vendor_names())}")


@cache
def _tables() -> dict[str, dict[str, Any]]:
    return read_toml(_FILE)


def vendor_names() -> tuple[str, ...]:
    """The vendors, in the order of their file."""
    return tuple(_tables())


def rules_of_vendor(vendor: str) -> tuple[Rule, ...]:
    """What the vendor's cards lack.

    Raises: UnknownVendorError.
    """
    if vendor not in _tables():
        raise UnknownVendorError.of(vendor)
    return tuple(
        refusing(
            name=f"{vendor}-{entry['name']}",
            reason=entry["reason"],
            shown_by=entry["shown_by"],
            **entry["words"],
        )
        for entry in _tables()[vendor].get("refuses", ())
    )


def rules_for(vendor: str) -> tuple[Rule, ...]:
    """All rules that hold on the vendor's cards.

    Raises: UnknownVendorError.
    """
    return (*RULES, *rules_of_vendor(vendor))
