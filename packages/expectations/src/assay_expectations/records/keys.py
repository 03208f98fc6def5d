"""Keys: the machine and content that must be equal before numbers are compared.

Versions of software are not part of the key. The yardstick does not depend on them, and an expectation
exists to show the effect of a new version.
"""

from collections.abc import Mapping

from pydantic import ConfigDict

from assay.errors import name_some
from assay.models.weight_files.hashing import StoredWeight
from assay.verdicts import Record


class PublishedRecord(Record):
    """Base of the records in the published JSON Schema, which takes descriptions from docstrings."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class Machine(PublishedRecord):
    """The hardware part of the key."""

    model_config = ConfigDict(frozen=True)

    vendor: str
    architecture: str
    """The target of the kernels.

    For a host processor, only its instruction set: vector extensions change the order of sums, and the
    limits hold for any order.
    """
    dtype: str
    precision: str
    """Format to which operands of matrix products are rounded."""


class Settings(PublishedRecord):
    """Settings of the run."""

    num_prompts: int = 4
    batch_size: int = 4
    max_new_tokens: int = 16
    seed: int = 0
    top_k: int = 8
    attention: str = "default"


class Weight(PublishedRecord):
    """A tensor of the checkpoint."""

    dtype: str
    """As in safetensors: "BF16"."""
    shape: list[int]
    hash: str
    """Hash of values, dtype and shape."""

    @classmethod
    def of(cls, stored: StoredWeight) -> "Weight":
        """Convert a tensor of a loaded checkpoint."""
        return cls(dtype=stored.dtype, shape=list(stored.shape), hash=stored.hash)


class Content(PublishedRecord):
    """The model and its inputs."""

    tokenizer_hash: str
    prompts_hash: str
    settings: Settings
    weights: dict[str, Weight]


class Key(PublishedRecord):
    """The key of an expectation."""

    machine: Machine
    content: Content


def machine_differences(expected: Machine, actual: Machine) -> list[str]:
    """List the differences between two machines."""
    return value_differences(expected.model_dump(), actual.model_dump())


def content_differences(expected: Content, actual: Content) -> list[str]:
    """List the differences in content, one line per kind."""
    found = weight_differences(expected.weights, actual.weights)
    for part in ("tokenizer", "prompts"):
        if getattr(expected, f"{part}_hash") != getattr(actual, f"{part}_hash"):
            found.append(f"different {part}")
    return found + value_differences(expected.settings.model_dump(), actual.settings.model_dump())


def value_differences(expected: Mapping[str, object], actual: Mapping[str, object]) -> list[str]:
    """List the differences between named values."""
    return [
        f"{name} is {actual.get(name, 'absent')}, expected {expected.get(name, 'absent')}"
        for name in sorted(expected.keys() | actual.keys())
        if expected.get(name) != actual.get(name)
    ]


def weight_differences(expected: Mapping[str, Weight], actual: Mapping[str, Weight]) -> list[str]:
    """List the differences between checkpoints, one line per kind."""
    missing = {name: expected[name] for name in sorted(expected.keys() - actual.keys())}
    new = {name: actual[name] for name in sorted(actual.keys() - expected.keys())}
    renamed: list[str] = []
    for name in list(missing):
        other = next((one for one in new if new[one] == missing[name]), None)
        if other is not None:
            renamed.append(f"{name} is now {other}")
            del missing[name], new[other]
    formats, values = [], []
    for name in sorted(expected.keys() & actual.keys()):
        before, now = expected[name], actual[name]
        if (before.dtype, before.shape) != (now.dtype, now.shape):
            formats.append(
                f"{name} is {now.dtype} {now.shape}, expected {before.dtype} {before.shape}"
            )
        elif before != now:
            values.append(name)
    kinds = [
        (renamed, f"renamed weights ({len(renamed)})"),
        (list(missing), f"missing weights ({len(missing)})"),
        (list(new), f"new weights ({len(new)})"),
        (formats, f"weights with a different dtype or shape ({len(formats)})"),
        (values, f"weights with different values ({len(values)} of {len(expected)})"),
    ]
    return [f"{kind}: {name_some(names)}" for names, kind in kinds if names]
