"""What the process of `assay smoke data` is asked, and what it answers."""

from typing import Literal, get_args

from pydantic import Field

from assay.errors import UsageError
from assay.models.remote_code import RemoteCode
from assay.plugins import find_plugin_file
from assay.verdicts import Record
from assay_smoke.data.properties import SubjectReport

Subject = Literal[
    "chat", "labels", "collator", "packing", "sampler", "batch-sampler", "accumulation", "workers"
]
SUBJECTS: tuple[Subject, ...] = get_args(Subject)

NOT_ASKED_FOR = "not asked for"


class DataRequest(Record):
    """The options of the command: what users give of their own is FILE.py:NAME, or None.

    model: MODEL, or a folder with a tokenizer alone; None for the tokenizers made by code.
    truncation: what is done with chats that are too long, where it is declared.
    features: whether samples have masked labels, or none and every token counts.
    """

    model: str | None = None
    render: str | None = None
    collator: str | None = None
    packing: str | None = None
    sampler: str | None = None
    batch_sampler: str | None = None
    accumulation: str | None = None
    loader: str | None = None
    dataset: str | None = None
    truncation: Literal["keep-start", "keep-end", "drop"] | None = None
    features: Literal["masked", "plain"] = "masked"
    remote_code: RemoteCode = "refuse"

    @property
    def own_code(self) -> dict[str, str]:
        """By option, what the user gave of his own."""
        names = (
            "render", "collator", "packing", "sampler", "batch_sampler", "accumulation", "loader",
            "dataset",
        )  # fmt: skip
        given: dict[str, str | None] = {name: getattr(self, name) for name in names}
        return {name: reference for name, reference in given.items() if reference is not None}

    def require_meaning(self) -> None:
        """Raises: UsageError for a file that is not there, or an option without what it is for."""
        for reference in self.own_code.values():
            find_plugin_file(reference)
        if self.truncation and not (self.render or self.model):
            raise UsageError("--truncation says what --render or MODEL's template does: give one")
        if self.features != "masked" and not (self.collator or self.packing):
            raise UsageError("--features are samples for --collator or --packing: give one")


class CheckReport(Record):
    """What came of one subject: a report, or why there is none.

    problem: what it raised, or the form of what it returned; "" where it ran through.
    """

    subject: Subject
    report: SubjectReport
    problem: str = ""


class DataAnswer(Record):
    """Everything that was checked, and why the other subjects were not."""

    checks: list[CheckReport]
    left_out: dict[Subject, str]
    notes: list[str] = Field(default_factory=list)
