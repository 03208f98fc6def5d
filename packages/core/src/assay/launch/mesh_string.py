"""`--mesh dp=2,tp=2`: the ranks of a candidate by axis. Imports no torch."""

from collections.abc import Sequence

from assay.counts import parse_count
from assay.errors import UsageError

AXES = ("dp", "tp", "pp")


def parse_mesh(text: str, known: Sequence[str] = AXES) -> dict[str, int]:
    """Parse a text such as "dp=2,tp=2" to sizes by axis, the outermost first. Raises: UsageError."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in known or name in axes or not size.isdecimal() or not size.strip("0"):
            raise UsageError(
                f"--mesh {text}: {part.strip()!r} is not an axis; write it as"
                f" {','.join(f'{axis}=2' for axis in known[:2])}, with axes of {', '.join(known)}, each"
                " once, of at least 1 rank"
            )
        axes[name] = parse_count(f"--mesh {name}", size)
    return axes
