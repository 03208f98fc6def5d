"""Recognizes failures of the machine in messages. Only these are retried."""

import re

# Messages of a full disk, an exhausted quota or a limit of file size.
FULL_DISK = ("No space left on device", "Disk quota exceeded", "File too large")

# Messages of drivers, the operating system and torch. A lost connection to a rank is not among them:
# a crashed peer causes the same message.
_SIGNS = {
    "out of disk": "|".join(FULL_DISK),
    "device lost": (
        r"device ?(?:was |is |has been )?lost|DEVICE_LOST|device not ready|uncorrectable \w+ error|"
        r"fell off the bus|device .* in error state"
    ),
    "network": r"No route to host|Network is unreachable|Temporary failure in name resolution",
}


def failed_part(text: str | None) -> str | None:
    """Return the part of the machine whose failure `text` reports, or None."""
    for part, sign in _SIGNS.items():
        if text and re.search(sign, text, re.IGNORECASE):
            return part
    return None
