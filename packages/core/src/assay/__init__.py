"""assay: does this model train and generate on this accelerator as it does on the reference?

Importing this package imports no torch; `assay.capture` does when it is first used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from assay.recording.session import capture

__all__ = ["capture"]


def __getattr__(name: str) -> object:
    if name != "capture":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from assay.recording.session import capture

    return capture
