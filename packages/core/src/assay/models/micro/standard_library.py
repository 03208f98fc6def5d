"""Training and held-out text of micro models. Imports no torch."""

import sysconfig
import zlib
from pathlib import Path

# Tests are repetitive. The others are not on every machine, or are data rather than text.
_EXCLUDED = {"test", "tests", "site-packages", "idlelib", "__pycache__", "lib2to3", "turtledemo"}
_HELD_OUT_SHARE = 20


def standard_library_text() -> tuple[bytes, bytes]:
    """Return the training text and the held-out text, which is one file in 20."""
    root = Path(sysconfig.get_path("stdlib"))
    training: list[bytes] = []
    held_out: list[bytes] = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not _EXCLUDED.intersection(name.parts):
            is_held_out = zlib.crc32(name.as_posix().encode()) % _HELD_OUT_SHARE == 0
            (held_out if is_held_out else training).append(path.read_bytes())
    return b"\n".join(training), b"\n".join(held_out)
