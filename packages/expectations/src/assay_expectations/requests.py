"""Requests to the process that runs models, and its answers."""

from typing import Any

from pydantic import Field

from assay.comparing.coverage import Usage
from assay.verdicts import Number, Record
from assay_expectations.records import (
    Distributions,
    Key,
    Machine,
    Observed,
    Signature,
)


class SignatureRequest(Record):
    """A request to capture a model on a device."""

    model: str
    run: str


class Captured(Record):
    """The answer to a `SignatureRequest`, with fields as in `Expectation` and `Provenance`."""

    key: Key
    signature: Signature
    layers: dict[str, Number]
    on_host: Distributions | None
    """Outputs of the host in the same dtype; None if the host was captured."""
    product: str
    versions: dict[str, str]
    torch_settings: dict[str, Any]


class VerifyRequest(Record):
    """A request to observe the models of expectation files on a device."""

    files: list[str]
    run: str
    setup: str | None = None


class Seen(Record):
    """The observation of one expectation file."""

    file: str
    observed: Observed | None = None
    """Outputs of the model here; None if it did not run."""
    usage: Usage | None = None
    """Parts of the model that ran."""
    stale: list[str] = Field(default_factory=list)
    """Differences in content, which make the expectation stale."""
    problem: str | None = None
    """Reason why the model could not run."""


class AllSeen(Record):
    """The answer to a `VerifyRequest`."""

    machine: Machine
    versions: dict[str, str]
    seen: list[Seen]
