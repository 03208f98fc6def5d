"""What a process found when it compared a loaded model with its files."""

from typing import Literal

from pydantic import Field

from assay.verdicts import Number, Record

# Why a parameter or buffer is wrong; `assay.comparing.loaded` has the words.
# differs: not the values of the files; not-stored: no tensor of the files makes it up, and nothing
# else does; varies: a second load gives it other values; not-built: its class gives it other values
# where it is built from config.json alone.
WeightProblem = Literal["differs", "not-stored", "varies", "not-built"]

# Of a key of config.json that nothing reads. misspelt: a key that is read has nearly its name, and
# is absent from the file, so that its default was used; overridden: the model has another value for
# it; misplaced: the code looked for it elsewhere in the file, and took a default; unread: any other.
KeyProblem = Literal["misspelt", "overridden", "misplaced", "unread"]


class WeightDifference(Record):
    """Values of a parameter or buffer that are not what they should be.

    rows: the first and last that differ, of `num_rows` along the first dim; num_differing: how many
        rows do.
    error: relative error of these rows (Frobenius norm); largest: of any element, in units in the
        last place of the dtype.
    values_of: another name in the model whose stored values it holds.
    """

    name: str
    problem: WeightProblem = "differs"
    rows: tuple[int, int] = (0, 0)
    num_differing: int = 0
    num_rows: int = 1
    error: Number = 0.0
    largest: Number = 0.0
    values_of: str | None = None

    @property
    def beyond_rounding(self) -> bool:
        """Whether it is more than two roundings of one number to the dtype can differ."""
        return not self.largest <= 1.0


class UnreadKey(Record):
    """A key of config.json that no code read; nearest: the most similar name that was read.

    used, stored: of an overridden key, the values that the model and the file have.
    """

    key: str
    problem: KeyProblem = "unread"
    nearest: str | None = None
    used: str | None = None
    stored: str | None = None


class LoadReport(Record):
    """The comparison of a freshly loaded model with its files.

    compared: parameters and buffers compared with the files or with a second load.
    num_keys: number of config.json keys that were checked for being read.
    unused: tensors of the files that the model neither uses nor declares to ignore.
    not_compared: parameters and buffers that could not be compared, each with the reason.
    non_finite: stored parameters and buffers that hold NaN or infinity, each with the number.
    settings: modules and attributes that differ from the class built from config.json.
    tokenizer, generation: errors of the tokenizer, and of the generation configuration.
    tokenizer_notes: correct properties of the tokenizer that are easy to misuse.
    """

    compared: int = 0
    num_keys: int = 0
    weights: list[WeightDifference] = Field(default_factory=list)
    unused: list[str] = Field(default_factory=list)
    not_compared: list[str] = Field(default_factory=list)
    non_finite: list[str] = Field(default_factory=list)
    keys: list[UnreadKey] = Field(default_factory=list)
    settings: list[str] = Field(default_factory=list)
    tokenizer: list[str] = Field(default_factory=list)
    generation: list[str] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)


class SetupChanges(Record):
    """What a setup function changed of the loaded weights, or a trainer before its first step.

    weights: parameters and buffers with other values; replaced: those that are gone, or have
        another shape or dtype, so that no values can be compared.
    """

    weights: list[WeightDifference] = Field(default_factory=list)
    replaced: list[str] = Field(default_factory=list)
