"""What a run of the suites gave: raw samples, and the numbers that follow from them."""

import json
import math
from typing import Any, Self

from pydantic import ConfigDict, Field, model_validator

from assay.files import seal
from assay.verdicts import SCHEMA, Record
from assay_bench.performance.suite_table import SUITES, Control

RESULT_FILE = "performance.json"


class SuiteResult(Record):
    """The samples of one suite, one of each list for each round.

    seconds: of the round's work. matmul_seconds, read_seconds: of the machine's own matrix product of
        `matmul_flops` operations, and of its pass over `read_bytes`, both taken just before the round
        and with the same number of threads.
    num_tokens, num_flops, num_bytes: what one round processes; 0 for what it has none of.
    peak_memory_bytes: of the process, in the kept rounds; 0 where the device does not tell.
    """

    suite: str
    seconds: list[float] = Field(min_length=1)
    matmul_seconds: list[float]
    matmul_flops: int
    read_seconds: list[float]
    read_bytes: int
    num_tokens: int = 0
    num_flops: int = 0
    num_bytes: int = 0
    peak_memory_bytes: int = 0
    num_threads: int = 1

    @model_validator(mode="after")
    def _require_whole_rounds(self) -> Self:
        samples = (self.seconds, self.matmul_seconds, self.read_seconds)
        whole = len(set(map(len, samples))) == 1
        if not whole or not all(0 < time < math.inf for times in samples for time in times):
            raise ValueError("every round needs its time and those of both controls, above zero")
        return self

    @property
    def control(self) -> Control:
        """Which control its times are divided by; reading for a suite of another version."""
        return SUITES[self.suite].control if self.suite in SUITES else "read"

    @property
    def fastest(self) -> float:
        """Seconds of the fastest round.

        What else a machine does only lengthens rounds, by as much as it likes; the fastest of a few
        dozen is disturbed least. Source: Chen & Revels, Robust benchmarking in noisy environments
        (2016), 4.
        """
        return min(self.seconds)

    @property
    def ratio(self) -> float:
        """How many times as long as its control it takes, each in its fastest round."""
        controls = self.matmul_seconds if self.control == "matmul" else self.read_seconds
        return self.fastest / min(controls)

    @property
    def tokens_per_second(self) -> float:
        """Of the fastest round; 0 where it has no tokens."""
        return self.num_tokens / self.fastest

    @property
    def flops_share(self) -> float:
        """Operations per second, as a share of those of the machine's own matmul."""
        return (self.num_flops / self.fastest) / (self.matmul_flops / min(self.matmul_seconds))

    @property
    def bytes_share(self) -> float:
        """Bytes per second, as a share of the machine's own read bandwidth."""
        return (self.num_bytes / self.fastest) / (self.read_bytes / min(self.read_seconds))


class PerformanceResult(Record):
    """performance.json: all suites of one run on one kind of machine.

    machine: the kind: product, architecture and number of processors. Machines of one kind are
        compared with each other.
    device: as `assay.devices.registry.describe_run` has it. skipped: for each suite that cannot run
        here, why.
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: int = Field(default=SCHEMA, alias="schema")
    machine: str
    run: str
    model: str
    suites: list[SuiteResult]
    skipped: dict[str, str] = Field(default_factory=dict)
    device: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    provenance: dict[str, Any] = Field(default_factory=dict)

    def to_json(self) -> str:
        """Format the text of performance.json, with its digest."""
        return seal(json.loads(self.model_dump_json(by_alias=True)))


def machine_kind(device: dict[str, Any], num_processors: int | None) -> str:
    """What machines have in common whose times can be compared.

    device: as `assay.devices.registry.describe_run` has it.
    """
    count = "" if num_processors is None else f", {num_processors} processors"
    return f"{device['device']} ({device['architecture']}{count})"
