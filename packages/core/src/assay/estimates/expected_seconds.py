"""The expected time of a candidate's phases, which its reference leaves in the golden."""

import json
from collections.abc import Sequence
from pathlib import Path

from assay.files import UnreadableFileError, read_json_object, write_whole

_SECONDS = "seconds.json"


def write_expected_seconds(golden: Path, device: str, seconds: Sequence[float]) -> None:
    """Write the expected seconds of each phase of a candidate on the reference's `device`.

    They are not a part of the golden, whose content does not depend on time.
    """
    write_whole(golden / _SECONDS, json.dumps({"device": device, "phases": list(seconds)}))


def read_expected_seconds(golden: Path, device: str) -> list[float]:
    """Read the seconds that `write_expected_seconds` wrote; none for another device, or if unreadable."""
    try:
        expected = read_json_object(golden / _SECONDS)
        return [float(one) for one in expected["phases"]] if expected["device"] == device else []
    except (UnreadableFileError, OSError, KeyError, ValueError, TypeError):
        return []
