"""Where an expectation comes from."""

from typing import Any

from pydantic import Field

from assay.verdicts import Record


class Provenance(Record):
    """Who captured what, where and with which software.

    run: DEVICE/DTYPE; product: of the device; versions: of what its numbers depend on.
    torch_settings: those that decide whether two runs are equal.
    container: the digest of the image that it ran in, from ASSAY_CONTAINER; None outside of one.
    process: of the command: date, arguments, commit, processor, threads, variables.
    approved_by, reason: who took it for right, and why; None where nobody has.
    """

    run: str
    product: str
    versions: dict[str, str]
    torch_settings: dict[str, Any]
    container: str | None = None
    process: dict[str, Any] = Field(default_factory=dict)
    approved_by: str | None = None
    reason: str | None = None
