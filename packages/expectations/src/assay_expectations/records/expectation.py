"""An expectation: what was run where, what came of it, and the limits that others are held to."""

import xxhash
from pydantic import Field

from assay.statistics import Statistic
from assay.verdicts import Number, Record
from assay_expectations.records.keys import Key
from assay_expectations.records.provenance import Provenance
from assay_expectations.records.values import Signature

SCHEMA = 2


class Expectation(Record):
    """One file.

    captures: the noise ratios of every capture by statistic, each made by a process of its own. Of
        the first, whose values are kept, they are 1.
    limits: of the noise ratios, by statistic; limits_origin: where they come from, in a line.
    layers: by module, those that end first before others, the error of its results in the captured run's
        worst call, relative to the yardstick's, with what it inherits; empty in files of before they were kept.
    hash: of all but itself and `provenance`, so that a number changed by hand is seen.
    """

    schema_: int = Field(default=SCHEMA, alias="schema", ge=SCHEMA, le=SCHEMA)
    model: str
    key: Key
    captures: list[dict[Statistic, Number]] = Field(min_length=1)
    limits: dict[Statistic, float]
    limits_origin: str
    signature: Signature
    layers: dict[str, Number] = Field(default_factory=dict)
    provenance: Provenance
    hash: str = ""

    @property
    def name(self) -> str:
        """A name for its file."""
        machine = self.key.machine
        rounded = "" if machine.precision == machine.dtype else f"-{machine.precision}"
        model = "-".join(part for part in self.model.replace(":", "/").split("/") if part)
        return f"{machine.vendor}-{machine.architecture}-{machine.dtype}{rounded}-{model}"

    def content_hash(self) -> str:
        """The hash that `hash` should be."""
        left_out = {"provenance", "hash"} | (set() if self.layers else {"layers"})
        text = self.model_dump_json(exclude=left_out, by_alias=True)
        return xxhash.xxh3_128_hexdigest(text.encode())
