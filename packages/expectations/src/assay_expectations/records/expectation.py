"""An expectation: key, captured outputs, limits and provenance."""

from typing import Any

import xxhash
from pydantic import Field

from assay.stages import Statistic
from assay.verdicts import Number
from assay_expectations.records.keys import Key, PublishedRecord
from assay_expectations.records.values import Signature

SCHEMA = 2


class Provenance(PublishedRecord):
    """Device, software and command of a capture, and its approval."""

    run: str
    """DEVICE/DTYPE."""
    product: str
    """Product name of the device."""
    versions: dict[str, str]
    """Versions of software that numbers depend on."""
    torch_settings: dict[str, Any]
    """Settings that decide if two runs are bitwise equal."""
    container: str | None = None
    """Image digest from ASSAY_CONTAINER."""
    process: dict[str, Any] = Field(default_factory=dict)
    """Date, arguments, commit, processor, threads, variables."""
    approved_by: str | None = None
    reason: str | None = None


class Expectation(PublishedRecord):
    """The content of an expectation file."""

    schema_: int = Field(default=SCHEMA, alias="schema", ge=SCHEMA, le=SCHEMA)
    model: str
    key: Key
    captures: list[dict[Statistic, Number]] = Field(min_length=1)
    """Noise ratios of each capture. Those of the first, whose values are stored, are 1."""
    limits: dict[Statistic, float]
    """Limits of the noise ratios."""
    limits_origin: str
    signature: Signature
    layers: dict[str, Number] = Field(default_factory=dict)
    """Relative error of each module's results in the worst call, including inherited errors.

    In the order in which modules end first. Older files have none.
    """
    provenance: Provenance
    hash: str = ""
    """Hash of all fields except itself and `provenance`, which detects manual changes."""

    @property
    def name(self) -> str:
        """Return the file name, without its suffix."""
        machine = self.key.machine
        rounded = "" if machine.precision == machine.dtype else f"-{machine.precision}"
        model = "-".join(part for part in self.model.replace(":", "/").split("/") if part)
        return f"{machine.vendor}-{machine.architecture}-{machine.dtype}{rounded}-{model}"

    def content_hash(self) -> str:
        """Compute the value that `hash` must have."""
        left_out = {"provenance", "hash"} | (set() if self.layers else {"layers"})
        text = self.model_dump_json(exclude=left_out, by_alias=True)
        return xxhash.xxh3_128_hexdigest(text.encode())
