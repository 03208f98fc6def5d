"""What the process that runs models is asked for, and what it answers."""

from typing import Any

from pydantic import Field

from assay.comparing.coverage import Usage
from assay.verdicts import Number, Record
from assay_expectations.records import (
    Distributions,
    Key,
    Machine,
    Observed,
    Settings,
    Signature,
)


class SignatureRequest(Record):
    """Capture this model on this device."""

    model: str
    run: str
    settings: Settings = Field(default_factory=Settings)


class Captured(Record):
    """What was captured, and on what.

    layers: as in an expectation.
    on_host: what the host gives in the same dtype; None where it is what was captured.
    product, versions, torch_settings: as in the provenance of an expectation.
    """

    key: Key
    signature: Signature
    layers: dict[str, Number]
    on_host: Distributions | None
    product: str
    versions: dict[str, str]
    torch_settings: dict[str, Any]


class VerifyRequest(Record):
    """Look at what these files hold on this device."""

    files: list[str]
    run: str
    setup: str | None = None


class Seen(Record):
    """The observation of one expectation file.

    observed: values of the model here; None if it was not run or its values were not comparable.
    stale: differences from the run at the capture, which no device can undo.
    usage: parts of the model that ran; None if the model was not run.
    problem: the reason why the model could not be run.
    """

    file: str
    observed: Observed | None = None
    usage: Usage | None = None
    stale: list[str] = Field(default_factory=list)
    problem: str | None = None


class AllSeen(Record):
    """What became of each file, on which machine, with which versions of software."""

    machine: Machine
    versions: dict[str, str]
    seen: list[Seen]
