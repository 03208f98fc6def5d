"""Names and versions of checked libraries."""

from importlib.metadata import PackageNotFoundError, version

from assay_smoke.data.properties import Subject

_OPTIONAL = {
    "accelerate": "its data loader and transformers' Trainer, which needs it, are",
    "trl": "its collator is",
}


def is_installed(library: str) -> bool:
    """Return whether `library` is installed."""
    try:
        version(library)
    except PackageNotFoundError:
        return False
    return True


def absent_libraries() -> list[str]:
    """Return a note for each optional library that is absent."""
    return [
        f"{library} is not installed: {left_out} not checked"
        for library, left_out in _OPTIONAL.items()
        if not is_installed(library)
    ]


def library_subject(library: str, what: str) -> Subject:
    """Name `what` of `library` as reports do: "torch 2.13.0 DistributedSampler"."""
    return Subject(f"{library} {version(library)} {what}")
