"""`assay devices`: list the devices of this machine, and for each vendor what is missing."""

import json
from typing import TYPE_CHECKING, Annotated

from assay.api.options import Option
from assay.cli.derived_commands import with_options
from assay.output.streams import print_text

if TYPE_CHECKING:
    from assay.devices.detection.isolation import ListedDevice

_STYLES = {"present": "green", "absent": "dim", "broken": "red"}


@with_options
def devices(
    *,
    timeout: Annotated[
        float, Option("How long the answers may take; some need longer.", "SECONDS", minimum=0.1)
    ] = 6.0,
    as_json: Annotated[bool, Option("Print one JSON object and nothing else.")] = False,
) -> None:
    """Show the devices of this machine, and for each vendor what is missing.

    A DEVICE of the list is the first part of a RUN, such as cuda:1/bfloat16. VERIFIED is what its adapter
    was run on; others were tried on a stand-in of the maker's software alone.

    Example: assay devices --json
    """
    from assay.devices.detection.isolation import list_devices

    lines = list_devices(timeout)
    if as_json:
        text = json.dumps({"schema": 1, "devices": [line.to_json() for line in lines]}, indent=1)
        print_text(text)
    else:
        _print_table(lines)


def _print_table(lines: "tuple[ListedDevice, ...]") -> None:
    from rich.text import Text

    from assay.output.console import new_table, open_console

    overview = new_table(
        "DEVICE", "VENDOR", "STATUS", "VERIFIED", "DISTRIBUTED", "COMPILE", "RUNNER LABELS"
    )
    details = new_table("VENDOR", "FOUND OR MISSING")
    for line in lines:
        vendor = line.vendor
        overview.add_row(
            line.device,
            vendor.title if vendor else "?",
            Text(line.status, style=_STYLES[line.status]),
            (vendor.verified or "no") if vendor else "?",
            vendor.distributed_backend if vendor else "?",
            vendor.compile_backend if vendor else "?",
            ", ".join(vendor.runner_labels) if vendor else "?",
        )
        details.add_row(vendor.title if vendor else line.device, Text(_found_or_missing(line)))
    open_console().print(overview, "", details, sep="\n")


def _found_or_missing(line: "ListedDevice") -> str:
    """Return the device names to use, or what to install."""
    if line.missing:
        return line.missing
    counted = {product: line.products.count(product) for product in line.products}
    found = ", ".join(
        f"{count} x {product}" if count > 1 else product for product, count in counted.items()
    )
    names = " ".join(f"{line.device}:{variant}" for variant in line.variants)
    return f"{found}: {names}" if names else found
