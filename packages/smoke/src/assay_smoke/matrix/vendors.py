"""Vendors of accelerators, and the rules for their cards."""

from functools import cache
from pathlib import Path
from typing import Any

from assay.errors import UsageError
from assay.files import read_toml
from assay_smoke.matrix.rules import RULES, Rule, refusing

# The vendor of machines without an accelerator.
HOST = "cpu"

_FILE = Path(__file__).with_name("vendors.toml")


@cache
def _tables() -> dict[str, dict[str, Any]]:
    return read_toml(_FILE)


def vendor_names() -> tuple[str, ...]:
    """Return the vendors in the order of their file."""
    return tuple(_tables())


def rules_of_vendor(vendor: str) -> tuple[Rule, ...]:
    """Return the rules for the vendor's cards alone.

    Raises: UsageError for an unknown vendor.
    """
    if vendor not in _tables():
        raise UsageError(f"--vendor {vendor}: there is {', '.join(vendor_names())}")
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
    """Return all rules that hold on the vendor's cards.

    Raises: UsageError for an unknown vendor.
    """
    return (*RULES, *rules_of_vendor(vendor))
