"""Names of what is checked in installed libraries, with their versions."""

from importlib.metadata import PackageNotFoundError, version

from assay_smoke.data.running_code import Subject


def is_installed(library: str) -> bool:
    """Whether `library` can be imported here."""
    try:
        version(library)
    except PackageNotFoundError:
        return False
    return True


def library_subject(library: str, what: str) -> Subject:
    """`what` of `library`, as reports name it: "torch 2.13.0 DistributedSampler"."""
    return Subject(f"{library} {version(library)} {what}")
