"""Requests to the processes of `assay check generate`, and their answers, as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import xxhash
from pydantic import BeforeValidator, Field, PlainSerializer, PositiveInt

from assay.counts import LARGEST_SEED, MOST
from assay.devices.run_string import Run, parse_run
from assay.models.loaded.report import LoadReport, SetupChanges
from assay.models.remote_code import RemoteCode
from assay.sites import JudgedLevel, KeptFiles, RecordedLevel
from assay.verdicts import Outcome, Record

# Names of stored measurements: of the noise run in a golden, of the candidate in its own trace.
NOISE, REPLAY = "noise", "replay"
GOLDEN_SCHEMA = 4
# Name of the reference's load report in a golden.
LOAD = "load"
# Name of the model usage in a golden and in a candidate's trace.
USAGE = "usage"


def _parse_text(value: object) -> object:
    return parse_run(value) if isinstance(value, str) else value


RunField = Annotated[Run, BeforeValidator(_parse_text), PlainSerializer(str)]
"""A RUN, written to JSON as DEVICE/DTYPE."""


class InputOptions(Record):
    """The prompts to run, and the number of tokens to generate."""

    prompts: str | None = None
    prompt_length: str | None = None
    batch_size: PositiveInt = Field(4, le=MOST)
    max_new_tokens: PositiveInt = Field(32, le=MOST)
    chat: bool = False
    seed: int = Field(0, ge=-LARGEST_SEED, le=LARGEST_SEED)
    sampling: dict[str, Any] = Field(default_factory=dict)


class GoldenRequest(Record):
    """A request to run the reference and record a golden."""

    model: str
    reference: RunField
    noise_for: list[str]
    inputs: InputOptions = Field(default_factory=InputOptions)
    level: RecordedLevel = "module"
    folder: str
    max_disk: int | None = None
    """Bytes that the golden may take; None for the free space."""
    max_memory: int | None = None
    """Bytes that the reference may take; None for the free memory."""
    max_seconds: float | None = None
    """Seconds that reference and candidate may take together; None for any time."""
    remote_code: RemoteCode = "refuse"


class CandidateRequest(Record):
    """A request to run the candidate against a golden."""

    model: str
    candidate: RunField
    mesh: dict[str, int] = Field(default_factory=dict)
    """Number of ranks on each axis; empty for one process."""
    golden: str
    folder: str
    setup: str | None = None
    level: JudgedLevel = "modules"
    options: dict[str, str] = Field(default_factory=dict)
    inputs: dict[str, Any] = Field(default_factory=dict)
    """Input options that the user gave with the golden; they must equal the golden's."""
    remote_code: RemoteCode = "refuse"


class OperationsRequest(Record):
    """A request to record the operations of one module call, on one side of a check."""

    candidate: CandidateRequest
    side: Literal["reference", "candidate"]
    folder: str
    module: str
    batch: int
    step: int
    max_memory: int | None = None


class EquivalenceRequest(Record):
    """A request to run the candidate's code, and what it recorded, in float64 against a golden."""

    candidate: CandidateRequest
    folder: str
    """For what the candidate's code records, or with it."""
    ports: list[tuple[str, str, str]] = Field(default_factory=list)
    """Stage, module and port of the values that failed."""
    max_memory: int | None = None
    """Largest number of bytes that the model may take; None for what is free."""


class ModelIdentity(Record):
    """The model of a golden, identified by content."""

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
    """The part of a golden for candidates in one dtype."""

    dtype: str
    yardstick_dtype: str
    reference_deterministic: bool
    num_calls: int = 0
    trace_digest: str = ""


class GoldenManifest(Record):
    """The content of golden.json."""

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
        """Hash all fields but `digest`."""
        text = self.model_dump_json(by_alias=True, exclude={"digest"})
        return xxhash.xxh3_128_hexdigest(text.encode())


class OutputProblem(Record):
    """The reason why a level has no output of the candidate."""

    reason: str
    outcome: Outcome


class CandidateReport(Record):
    """The candidate process's answer, apart from its measurements."""

    run: dict[str, Any]
    deterministic: bool
    spread: float
    weights_different: list[str]
    load: LoadReport | None = None
    changes: SetupChanges = Field(default_factory=SetupChanges)
    """Changes that the setup function made."""
    untied: list[str] = Field(default_factory=list)
    problems: dict[str, OutputProblem] = Field(default_factory=dict)
    """Levels without output of the candidate; nothing is attached for them."""
    notes: list[str] = Field(default_factory=list)
    peak_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class GenerateCheck:
    """The options of a check. Exactly one of `reference` and `golden` is given."""

    model: str
    candidate: Run
    reference: Run | None = None
    golden: Path | None = None
    verify_golden: bool = True
    """True to compare the bytes of `golden` with their recorded hashes."""
    inputs: InputOptions = field(default_factory=InputOptions)
    given: frozenset[str] = frozenset()
    """Options of `inputs` that the user set; they must equal the golden's."""
    level: JudgedLevel = "modules"
    setup: str | None = None
    options: dict[str, str] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Number of candidate ranks on each axis; empty for one process."""
    limits: str = "noise"
    allow_unused: tuple[str, ...] = ()
    """GLOBs of modules, parameters and experts that need not be compared."""
    keep: KeptFiles = "full"
    max_disk: int | None = None
    """Bytes that the golden may take."""
    max_memory: int | None = None
    """Bytes that the reference may take."""
    max_seconds: float | None = None
    """Seconds that both sides may take."""
    remote_code: RemoteCode = "refuse"
    command: tuple[str, ...] = ()
    """The command line that repeats the check."""

    @property
    def dtype(self) -> str:
        """Return the candidate's dtype."""
        return self.candidate.dtype

    @property
    def num_ranks(self) -> int:
        """Return the number of candidate processes."""
        return prod(self.mesh.values())
