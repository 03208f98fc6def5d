"""What the process that runs models is asked for, and what it answers."""

from pydantic import Field

from assay.verdicts import Record
from assay_expectations.records import Key, LogProbabilities, Machine, Settings, Signature


class CaptureRequest(Record):
    """Capture this model on this device."""

    model: str
    run: str
    settings: Settings = Field(default_factory=Settings)


class Captured(Record):
    """What was captured."""

    key: Key
    signature: Signature


class VerifyRequest(Record):
    """Look at what is said in these files on this device."""

    files: list[str]
    run: str
    setup: str | None = None


class Seen(Record):
    """What became of one file.

    key: of the model as it is here; None where the file is of another machine.
    log_probabilities: empty where the keys differ: there is nothing to compare with.
    """

    file: str
    machine: Machine
    key: Key | None = None
    log_probabilities: list[LogProbabilities] = Field(default_factory=list)


class AllSeen(Record):
    """One entry for each file."""

    seen: list[Seen]
