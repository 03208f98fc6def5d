"""What the two processes of a check are asked for, and what they answer, as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import xxhash
from pydantic import Field, PositiveInt

from assay.counts import LARGEST_SEED, MOST
from assay.models.loaded.report import LoadReport, SetupChanges
from assay.models.remote_code import RemoteCode
from assay.sites import JudgedLevel, RecordedLevel
from assay.verdicts import Record

# Names of measurements: of the noise run beside a golden, of the candidate in its own trace.
NOISE, REPLAY = "noise", "replay"
GOLDEN_SCHEMA = 3
# What the trusted process found when it had loaded the model, attached to a golden.
LOAD = "load"
# Name of the model usage of a process, attached to a golden and to a candidate's trace.
USAGE = "usage"


class InputOptions(Record):
    """Which prompts are run, and how many tokens are generated."""

    prompts: str | None = None
    prompt_length: str | None = None
    batch_size: PositiveInt = Field(4, le=MOST)
    max_new_tokens: PositiveInt = Field(32, le=MOST)
    chat: bool = False
    seed: int = Field(0, ge=-LARGEST_SEED, le=LARGEST_SEED)
    sampling: dict[str, Any] = Field(default_factory=dict)


class CaptureRequest(Record):
    """The trusted process: run the reference and keep what a candidate is judged by."""

    model: str
    reference: str
    noise_for: list[str]
    inputs: InputOptions = Field(default_factory=InputOptions)
    level: RecordedLevel = "module"
    folder: str
    remote_code: RemoteCode = "refuse"


class CandidateRequest(Record):
    """The candidate process: run the model as it is to be judged, against a golden.

    inputs: options of the inputs that the user gave beside the golden; they must be its own.
    mesh: ranks by axis, over which the model is divided.
    """

    model: str
    candidate: str
    mesh: dict[str, int] = Field(default_factory=dict)
    golden: str
    folder: str
    setup: str | None = None
    level: JudgedLevel = "modules"
    options: dict[str, str] = Field(default_factory=dict)
    inputs: dict[str, Any] = Field(default_factory=dict)
    remote_code: RemoteCode = "refuse"


class OperationsRequest(Record):
    """Either side: the operations of one call of one stage.

    candidate: None for the trusted side, which runs yardstick and noise run.
    """

    model: str
    golden: str
    dtype: str
    folder: str
    module: str
    batch: int
    step: int
    call: int = 0
    candidate: CandidateRequest | None = None
    remote_code: RemoteCode = "refuse"


class EquivalenceRequest(Record):
    """The candidate's code once more in float64, against the golden's part for `dtype`."""

    model: str
    golden: str
    dtype: str
    setup: str | None = None
    options: dict[str, str] = Field(default_factory=dict)
    remote_code: RemoteCode = "refuse"


class ModelIdentity(Record):
    """Which model it was, by content."""

    name: str
    architecture: str
    weights_hash: str
    tokenizer_hash: str
    checkpoint_dtype: str
    vocab_size: int
    num_parameters: int
    max_positions: int | None = None
    can_generate: bool = True


class Section(Record):
    """One dtype of a golden. The yardstick and the noise run of this dtype.

    trace_digest: the hash of all that its trace holds.
    """

    dtype: str
    yardstick_dtype: str
    reference_deterministic: bool
    num_calls: int = 0
    trace_digest: str = ""


class GoldenManifest(Record):
    """golden.json: what was captured, and where; digest: the hash of all other fields."""

    schema_: int = Field(default=GOLDEN_SCHEMA, alias="schema")
    model: ModelIdentity
    reference: dict[str, Any]
    inputs: InputOptions
    inputs_hash: str
    level: RecordedLevel
    sections: dict[str, Section]
    notes: list[str] = Field(default_factory=list)
    environment: dict[str, Any] = Field(default_factory=dict)
    digest: str = ""

    def content_hash(self) -> str:
        """The hash of all fields but `digest`."""
        text = self.model_dump_json(by_alias=True, exclude={"digest"})
        return xxhash.xxh3_128_hexdigest(text.encode())


class CandidateReport(Record):
    """What the candidate process says of itself, beside its measurements.

    load: what it found when it had loaded the model; changes: what the setup function changed.
    """

    run: dict[str, Any]
    deterministic: bool
    spread: float
    weights_different: list[str]
    load: LoadReport | None = None
    changes: SetupChanges = Field(default_factory=SetupChanges)
    untied: list[str] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    peak_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class GenerateCheck:
    """The options of a check. Exactly one of `reference` and `golden` is given.

    verify_golden: True to compare the bytes of `golden` with their captured hashes.
    given: options of `inputs` that the user set; the golden must have been captured with them.
    mesh: number of candidate ranks on each axis of the mesh; empty for one process.
    allow_unused: GLOBs of modules, parameters and experts that need not be compared.
    command: the command line that repeats the check.
    """

    model: str
    candidate: str
    reference: str | None = None
    golden: Path | None = None
    verify_golden: bool = True
    inputs: InputOptions = field(default_factory=InputOptions)
    given: frozenset[str] = frozenset()
    level: JudgedLevel = "modules"
    setup: str | None = None
    options: dict[str, str] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)
    limits: str = "noise"
    allow_unused: tuple[str, ...] = ()
    remote_code: RemoteCode = "refuse"
    command: tuple[str, ...] = ()

    @property
    def dtype(self) -> str:
        """The candidate's dtype."""
        return self.candidate.rpartition("/")[2]

    @property
    def num_ranks(self) -> int:
        """Processes that compute the candidate together."""
        return prod(self.mesh.values())
