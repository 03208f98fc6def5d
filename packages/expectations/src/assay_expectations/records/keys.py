"""What has to be alike before numbers are compared: the machine, and what was run on it.

Versions of software are no part of it. Values are held to a yardstick that does not depend on them,
and what a new version does to a model is what people want to know.
"""

from collections.abc import Mapping

from assay.errors import name_some
from assay.models.weight_files.hashing import StoredWeight
from assay.verdicts import Record


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


class Weight(Record):
    """A tensor of the checkpoint.

    dtype: as safetensors names it, such as "BF16"; hash: of its values, with dtype and shape.
    """

    dtype: str
    shape: list[int]
    hash: str

    @classmethod
    def of(cls, stored: StoredWeight) -> "Weight":
        """As it was read."""
        return cls(dtype=stored.dtype, shape=list(stored.shape), hash=stored.hash)


class Content(Record):
    """What was run: the checkpoint by name of its tensors, and all else by hash."""

    tokenizer_hash: str
    prompts_hash: str
    settings: Settings
    weights: dict[str, Weight]


class Key(Record):
    """Everything that has to be equal before numbers are compared."""

    machine: Machine
    content: Content


def machine_differences(expected: Machine, actual: Machine) -> list[str]:
    """What differs between two machines, one line each."""
    return value_differences(expected.model_dump(), actual.model_dump())


def content_differences(expected: Content, actual: Content) -> list[str]:
    """What differs in what was run, one line for each kind of difference."""
    found = weight_differences(expected.weights, actual.weights)
    for part in ("tokenizer", "prompts"):
        if getattr(expected, f"{part}_hash") != getattr(actual, f"{part}_hash"):
            verb = "is another one" if part == "tokenizer" else "are other ones"
            found.append(f"the {part} {verb}")
    return found + value_differences(expected.settings.model_dump(), actual.settings.model_dump())


def value_differences(expected: Mapping[str, object], actual: Mapping[str, object]) -> list[str]:
    """What differs between named values, one line each."""
    return [
        f"{name} is {actual.get(name, 'absent')}, expected {expected.get(name, 'absent')}"
        for name in sorted(expected.keys() | actual.keys())
        if expected.get(name) != actual.get(name)
    ]


def weight_differences(expected: Mapping[str, Weight], actual: Mapping[str, Weight]) -> list[str]:
    """What differs in the tensors of a checkpoint, one line for each kind of difference."""
    missing = {name: expected[name] for name in sorted(expected.keys() - actual.keys())}
    new = {name: actual[name] for name in sorted(actual.keys() - expected.keys())}
    renamed: list[str] = []
    for name in list(missing):
        other = next((one for one in new if new[one] == missing[name]), None)
        if other is not None:
            renamed.append(f"{name} is called {other}")
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
    said = [
        (renamed, "weights with another name"),
        (list(missing), "weights that are missing"),
        (list(new), "weights that are new"),
        (formats, "weights of another dtype or shape"),
        (values, f"weights with other values, of {len(expected)}"),
    ]
    return [f"{len(names)} {what}: {name_some(names)}" for names, what in said if names]
