"""Requests to the process that runs models, and its answers."""

from pydantic import Field

from assay.comparing.coverage import Usage
from assay.verdicts import Record
from assay_expectations.records import Distributions, Expectation, Machine, Observed


class CaptureOptions(Record):
    """Options of a capture, and the request to its first process."""

    model: str
    run: str
    num_captures: int = 3
    """Number of processes that capture, one after the other."""
    approved_by: str | None = None
    reason: str | None = None


class Captured(Record):
    """The answer to `CaptureOptions`."""

    expectation: Expectation
    """Of this capture alone, without `process` in its provenance."""
    on_host: Distributions | None
    """Outputs of the host in the same dtype; None if the host was captured."""


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
