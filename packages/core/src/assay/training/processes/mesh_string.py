"""`--mesh dp=2,tp=2`: the ranks of a candidate by axis. Imports no torch."""

from assay.errors import UsageError

AXES = ("dp", "tp", "pp")


def parse_mesh(text: str) -> dict[str, int]:
    """Axes from a text such as "dp=2,tp=2", the outermost first. Raises: UsageError."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in AXES or name in axes or not size.isdecimal() or int(size) < 1:
            raise UsageError(
                f"--mesh {text}: {part.strip()!r} is no axis; write it as dp=2,tp=2, with axes of"
                f" {', '.join(AXES)}, each once, of at least 1 rank"
            )
        axes[name] = int(size)
    return axes
