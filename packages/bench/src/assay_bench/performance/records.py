"""The suites, their request and results, and the file performance.json. Imports no torch."""

import json
import math
from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from assay.devices.run_string import parse_run
from assay.errors import UsageError, suggest
from assay.files import seal
from assay.models.sources import resolve_model
from assay.verdicts import SCHEMA, Record

# A product of two square matrices, or a pass over a tensor larger than the caches.
Control = Literal["matmul", "read"]

# In the order of their run. The control is the divisor of the times of a suite: matmul if arithmetic
# dominates, read if memory traffic does.
SUITES: dict[str, Control] = {
    "training-step": "matmul",
    "prefill": "matmul",
    "decode": "read",
    "collectives": "read",
    "capture": "read",
    "compare": "read",
    "checkpoint-save": "read",
    "checkpoint-load": "read",
}


def choose_suites(names: Sequence[str]) -> list[str]:
    """Return the named suites in the order of their run; all suites without names.

    Raises: UsageError.
    """
    for name in names:
        if name not in SUITES:
            raise UsageError(suggest("suite", name, SUITES))
    return [suite for suite in SUITES if not names or suite in names]


RESULT_FILE = "performance.json"

# Discarded rounds, which fill caches, allocators and kernels.
NUM_WARMUP_ROUNDS = 3
# At least. On a busy machine most short rounds are disturbed, so they also go on for some seconds.
NUM_ROUNDS, LEAST_SECONDS = 20, 3.0


class SuiteRequest(Record):
    """The suites to measure, and their settings."""

    suites: list[str] = Field(default_factory=list)
    """Names, in the order of their run."""
    run: str = "cpu/float32"
    model: str = "micro:llama"


def make_request(names: Sequence[str], run: str, model: str) -> SuiteRequest:
    """Request the named suites, by default all. Raises: UsageError for an unknown suite, run or model."""
    suites = choose_suites(names)
    parse_run(run)
    resolve_model(model)
    return SuiteRequest(suites=suites, run=run, model=model)


class SuiteResult(Record):
    """The samples of one suite. Lists have one entry per round."""

    suite: str
    seconds: list[float] = Field(min_length=1)
    """Time of the round's work."""
    matmul_seconds: list[float]
    """Time of a matrix product of `matmul_flops` operations just before the round."""
    matmul_flops: int
    read_seconds: list[float]
    """Time of a pass over `read_bytes` just before the round."""
    read_bytes: int
    num_tokens: int = 0
    """Tokens of one round; 0 if the suite processes none. The same holds for flops and bytes."""
    num_flops: int = 0
    num_bytes: int = 0
    peak_memory_bytes: int = 0
    """Peak of the process in the timed rounds; 0 if the device does not report it."""
    num_threads: int = 1

    @model_validator(mode="after")
    def _require_whole_rounds(self) -> Self:
        samples = (self.seconds, self.matmul_seconds, self.read_seconds)
        whole = len(set(map(len, samples))) == 1
        if not whole or not all(0 < time < math.inf for times in samples for time in times):
            raise ValueError(
                "every round needs three positive times: its own and those of both controls"
            )
        return self

    @property
    def control(self) -> Control:
        """Return the control of this suite; reading for a suite of another version."""
        return SUITES.get(self.suite, "read")

    @property
    def fastest(self) -> float:
        """Return the seconds of the fastest round.

        Other work on the machine can only lengthen a round, so the fastest round is disturbed least.
        Source: Chen & Revels, Robust benchmarking in noisy environments (2016), 4.
        """
        return min(self.seconds)

    @property
    def ratio(self) -> float:
        """Return the time relative to the control, each in its fastest round."""
        controls = self.matmul_seconds if self.control == "matmul" else self.read_seconds
        return self.fastest / min(controls)

    @property
    def tokens_per_second(self) -> float:
        """Return the throughput of the fastest round; 0 for a suite without tokens."""
        return self.num_tokens / self.fastest

    @property
    def flops_share(self) -> float:
        """Return operations per second, as a share of the machine's own matmul."""
        return (self.num_flops / self.fastest) / (self.matmul_flops / min(self.matmul_seconds))

    @property
    def bytes_share(self) -> float:
        """Return bytes per second, as a share of the machine's own read bandwidth."""
        return (self.num_bytes / self.fastest) / (self.read_bytes / min(self.read_seconds))


class PerformanceResult(Record):
    """The file performance.json: all suites of one run."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: int = Field(default=SCHEMA, alias="schema")
    machine: str
    """Product, architecture and number of processors."""
    run: str
    model: str
    suites: list[SuiteResult]
    skipped: dict[str, str] = Field(default_factory=dict)
    """Reasons of suites that cannot run here."""
    device: dict[str, Any] = Field(default_factory=dict)
    """As from `assay.devices.registry.describe_run`."""
    versions: dict[str, str] = Field(default_factory=dict)
    provenance: dict[str, Any] = Field(default_factory=dict)

    def to_json(self) -> str:
        """Format the text of performance.json, with its digest."""
        return seal(json.loads(self.model_dump_json(by_alias=True)))


def machine_kind(device: dict[str, Any], num_processors: int | None) -> str:
    """Describe the kind of machine.

    device: as from `assay.devices.registry.describe_run`.
    """
    count = "" if num_processors is None else f", {num_processors} processors"
    return f"{device['device']} ({device['architecture']}{count})"
