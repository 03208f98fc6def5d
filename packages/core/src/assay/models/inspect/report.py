"""Records of the comparison of a loaded model with its files."""

from typing import Literal

from pydantic import Field

from assay.verdicts import Number, Record

# Problems of a parameter or buffer; `assay.judge.loaded` has the words.
WeightProblem = Literal[
    "differs",  # its values are not those of the files
    "not-stored",  # neither the files nor the model's code make its values
    "varies",  # a second load results in other values
    "not-built",  # the class built from config.json alone has other values
]

# Problems of a key of config.json that no code reads.
KeyProblem = Literal[
    "misspelt",  # a key with nearly the same name is read and absent, so its default was used
    "overridden",  # the model has another value for it
    "misplaced",  # the code looked for it elsewhere in the file, and used a default
    "unread",
]


class WeightDifference(Record):
    """Wrong values of a parameter or buffer."""

    name: str
    problem: WeightProblem = "differs"
    rows: tuple[int, int] = (0, 0)
    """First and last row, along the first dim, that differ."""
    num_differing: int = 0
    """Number of rows that differ."""
    num_rows: int = 1
    error: Number = 0.0
    """Relative error of these rows (Frobenius norm)."""
    largest: Number = 0.0
    """Largest difference of an element, in units in the last place of the dtype."""
    change: str = ""
    """A simple change that explains the difference, as a sentence."""
    values_of: str | None = None
    """Another name in the model whose stored values it holds."""

    @property
    def beyond_rounding(self) -> bool:
        """Return True if two roundings of one number to the dtype cannot differ this much."""
        return not self.largest <= 1.0


class UnreadKey(Record):
    """A key of config.json that no code read."""

    key: str
    problem: KeyProblem = "unread"
    nearest: str | None = None
    """The most similar name that was read."""
    used: str | None = None
    """The model's value of an overridden key."""
    stored: str | None = None
    """The file's value of an overridden key."""


class LoadReport(Record):
    """The comparison of a freshly loaded model with its files."""

    compared: int = 0
    """Number of parameters and buffers compared with the files or with a second load."""
    num_keys: int = 0
    """Number of checked config.json keys."""
    weights: list[WeightDifference] = Field(default_factory=list)
    unused: list[str] = Field(default_factory=list)
    """Stored tensors that the model neither uses nor declares to ignore."""
    not_compared: list[str] = Field(default_factory=list)
    """Parameters and buffers that could not be compared, with the reasons."""
    non_finite: list[str] = Field(default_factory=list)
    """Stored parameters and buffers with NaN or infinity, with the numbers."""
    keys: list[UnreadKey] = Field(default_factory=list)
    settings: list[str] = Field(default_factory=list)
    """Modules and attributes that differ from the class built from config.json."""
    tokenizer: list[str] = Field(default_factory=list)
    """Errors of the tokenizer."""
    generation: list[str] = Field(default_factory=list)
    """Errors of the generation configuration."""
    notes: list[str] = Field(default_factory=list)
    """Correct properties of the tokenizer that are easy to misuse."""


class SetupChanges(Record):
    """Changes of loaded weights by a setup function, or by a trainer before its first step."""

    weights: list[WeightDifference] = Field(default_factory=list)
    replaced: list[str] = Field(default_factory=list)
    """Tensors that are gone or have another shape or dtype, so that values cannot be compared."""
