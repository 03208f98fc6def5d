"""What the two processes of a cycle are asked for, and what they answer."""

from typing import Literal

from pydantic import Field

from assay.verdicts import Number, Record
from assay_smoke.planning import Cycle

Fingerprint = dict[str, str]


class PartRequest(Record):
    """One process: train from the start, or from the checkpoint in `checkpoint`."""

    part: Literal["uninterrupted", "resumed"]
    cycle: Cycle
    checkpoint: str
    output: str


class StepRecord(Record):
    """One optimizer step."""

    step: int
    loss: Number
    num_tokens: int
    grad_norm: Number


class PartReport(Record):
    """What a process saw; a fingerprint holds a hash of every leaf of a state, by its path.

    at_start, at_end: the parameters; trainable: the paths of those that should move.
    at_checkpoint: the whole state, after it was saved, or after it was loaded.
    adapter_in_memory, adapter_on_disk: of the checkpoint that this process wrote.
    problem: why the checkpoint could not be read or written; the rest is then empty.
    """

    steps: list[StepRecord] = Field(default_factory=list)
    trainable: list[str] = Field(default_factory=list)
    at_start: Fingerprint = Field(default_factory=dict)
    at_checkpoint: Fingerprint = Field(default_factory=dict)
    at_end: Fingerprint = Field(default_factory=dict)
    adapter_in_memory: Fingerprint = Field(default_factory=dict)
    adapter_on_disk: Fingerprint = Field(default_factory=dict)
    problem: str | None = None
