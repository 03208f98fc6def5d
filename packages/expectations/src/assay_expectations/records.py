"""An expectation: its key, what was seen, the limits that it is held to, and where it is from.

Nothing in a key is a wildcard: a capture of another device, software or model is never used in
place of one that is missing.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import xxhash
from pydantic import Field, ValidationError

from assay.errors import UsageError
from assay.runs.folders import write_whole
from assay.verdicts import SCHEMA, Number, Record

# Of one batch, by row, token and kept id; the last is that of all other ids together.
LogProbabilities = list[list[list[Number]]]


class ExpectationError(UsageError):
    """A file that is no expectation, or was changed by hand."""

    @classmethod
    def unreadable(cls, path: Path, problem: object) -> Self:
        """What is wrong with the file."""
        return cls(f"expectation {path} cannot be read: {problem}")


class Machine(Record):
    """What has to be alike in the hardware.

    architecture: what kernels are built for. Of a host processor only its instruction set: which
        vector extension is used changes the order of sums, and the limits hold for any order.
    precision: the format that operands of matrix products are rounded to.
    """

    vendor: str
    architecture: str
    dtype: str
    precision: str


class Settings(Record):
    """How the model was run, apart from the machine."""

    num_prompts: int = 4
    batch_size: int = 4
    max_new_tokens: int = 16
    seed: int = 0
    top_k: int = 8
    attention: str = "default"


class Content(Record):
    """What was run, by content."""

    weights_hash: str
    tokenizer_hash: str
    prompts_hash: str
    settings: Settings


class Key(Record):
    """Everything that has to be equal before numbers are compared."""

    machine: Machine
    software: dict[str, str]
    content: Content


class Signature(Record):
    """What the model said about every generated token of every prompt.

    tokens: what the yardstick chose, and what the model is forced to follow, by batch and row.
    top_ids: its most likely tokens at each place, by batch, row and token.
    yardstick: log-probabilities of `top_ids` and of the rest, in the highest precision.
    captured: the same of the captured run; its distance from the yardstick is the noise.
    """

    tokens: list[list[list[int]]]
    top_ids: list[list[list[list[int]]]]
    yardstick: list[LogProbabilities]
    captured: list[LogProbabilities]


class Expectation(Record):
    """One file.

    limits: of the noise ratios, by statistic, with a line that says where they come from.
    hash: of all the rest but `provenance`, so that a number changed by hand is seen.
    """

    schema_: int = Field(default=SCHEMA, alias="schema")
    model: str
    key: Key
    limits: dict[str, float]
    limits_origin: str
    signature: Signature
    provenance: dict[str, Any]
    hash: str = ""

    @property
    def name(self) -> str:
        """A name for its file."""
        machine = self.key.machine
        model = "-".join(part for part in self.model.replace(":", "/").split("/") if part)
        return f"{machine.vendor}-{machine.architecture}-{machine.dtype}-{model}"

    def content_hash(self) -> str:
        """The hash that `hash` should be."""
        text = self.model_dump_json(exclude={"provenance", "hash"}, by_alias=True)
        return xxhash.xxh3_128_hexdigest(text.encode())


def write_expectation(expectation: Expectation, output: Path) -> Path:
    """Write `expectation` to the file `output`, or under its name into the folder `output`.

    Returns: the file.
    """
    sealed = expectation.model_copy(update={"hash": expectation.content_hash()})
    path = output if output.suffix == ".json" else output / f"{expectation.name}.json"
    record = sealed.model_dump(mode="json", by_alias=True)
    # One line for each list of numbers: with indentation there would be one for each number.
    signature = {name: json.dumps(values) for name, values in record["signature"].items()}
    text = json.dumps(record | {"signature": {name: f"@{name}" for name in signature}}, indent=1)
    for name, numbers in signature.items():
        text = text.replace(f'"@{name}"', numbers)
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_whole(path, text + "\n")


def read_expectation(path: Path) -> Expectation:
    """The expectation in `path`. Raises: ExpectationError."""
    try:
        expectation = Expectation.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ExpectationError.unreadable(path, error.strerror) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ExpectationError.unreadable(path, f"{where}: {first['msg']}") from None
    if expectation.hash != expectation.content_hash():
        raise ExpectationError.unreadable(path, "its hash is not that of its content")
    return expectation


def differences(expected: Record, actual: Record) -> list[str]:
    """What differs between two keys or parts of keys, one line each."""
    sides = [dict(_flatten(side.model_dump())) for side in (expected, actual)]
    return [
        f"{name} is {sides[1].get(name, 'absent')}, expected {sides[0].get(name, 'absent')}"
        for name in sorted(sides[0].keys() | sides[1].keys())
        if sides[0].get(name) != sides[1].get(name)
    ]


def _flatten(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, item in value.items():
        if isinstance(item, dict):
            yield from _flatten(item, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", item
