"""Failures of the machine: only these are tried again, and each is shown."""

import re

# What drivers, the system and torch say; each line of one kind.
_SIGNS = {
    "out of disk": r"No space left on device|Disk quota exceeded|File too large",
    "device lost": (
        r"device ?(?:was |is |has been )?lost|DEVICE_LOST|device not ready|uncorrectable \w+ error|"
        r"fell off the bus|device .* in error state"
    ),
    "network": r"No route to host|Network is unreachable|Temporary failure in name resolution",
}


def failed_part(text: str | None) -> str | None:
    """Which part of the machine failed, by what was said; None for any other failure.

    A connection that a rank lost is none of them: a peer that crashed looks the same.
    """
    for part, sign in _SIGNS.items():
        if text and re.search(sign, text, re.IGNORECASE):
            return part
    return None
