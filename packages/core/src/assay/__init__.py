"""assay: check that a model trains and generates on an accelerator as it does on a reference.

Importing this package imports no torch: each name is loaded when it is first used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from assay.api.checks import check_generate, check_load, check_train, compare
    from assay.devices.torch_backend import seed_all
    from assay.recording.capture import capture
    from assay.verdicts import Verdict

    __version__: str

_HOMES = {
    "Verdict": "assay.verdicts",
    "capture": "assay.recording.capture",
    "compare": "assay.api.checks",
    "check_generate": "assay.api.checks",
    "check_load": "assay.api.checks",
    "check_train": "assay.api.checks",
    "seed_all": "assay.devices.torch_backend",
}

__all__ = [
    "Verdict",
    "__version__",
    "capture",
    "check_generate",
    "check_load",
    "check_train",
    "compare",
    "seed_all",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("assay-core")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
