"""Names of what is checked in installed libraries, with their versions."""

from importlib.metadata import PackageNotFoundError, version

from assay_smoke.data.running_code import Subject

_OPTIONAL = {
    "accelerate": "its data loader and transformers' Trainer, which needs it, are",
    "trl": "its collator is",
}


def is_installed(library: str) -> bool:
    """Whether `library` can be imported here."""
    try:
        version(library)
    except PackageNotFoundError:
        return False
    return True


def absent_libraries() -> list[str]:
    """For each library that is checked where it is installed, and is not: what is left out."""
    return [
        f"{library} is not installed: {left_out} not checked"
        for library, left_out in _OPTIONAL.items()
        if not is_installed(library)
    ]


def library_subject(library: str, what: str) -> Subject:
    """`what` of `library`, as reports name it: "torch 2.13.0 DistributedSampler"."""
    return Subject(f"{library} {version(library)} {what}")
