"""The request to the process of `assay smoke data`, and its answer."""

from pydantic import Field

from assay.errors import UsageError
from assay.models.remote_code import RemoteCode
from assay.plugins import find_plugin_file
from assay.verdicts import Record
from assay_smoke.data.properties import DataLevel, SubjectReport
from assay_smoke.data.protocols import FeatureKind, Truncation

NOT_ASKED_FOR = "not asked for"


class DataRequest(Record):
    """Options of the command. The user's own code is given as FILE.py:NAME."""

    model: str | None = None
    """MODEL, or a folder with a tokenizer alone; None for generated tokenizers."""
    render: str | None = None
    collator: str | None = None
    packing: str | None = None
    sampler: str | None = None
    batch_sampler: str | None = None
    accumulation: str | None = None
    loader: str | None = None
    dataset: str | None = None
    truncation: Truncation | None = None
    """Declared treatment of chats that are too long."""
    features: FeatureKind = "masked"
    """Whether samples have masked labels, or none so that every token counts."""
    remote_code: RemoteCode = "refuse"

    @property
    def own_code(self) -> dict[str, str]:
        """Return the user's own code by option."""
        names = (
            "render", "collator", "packing", "sampler", "batch_sampler", "accumulation", "loader",
            "dataset",
        )  # fmt: skip
        given: dict[str, str | None] = {name: getattr(self, name) for name in names}
        return {name: reference for name, reference in given.items() if reference is not None}

    def require_meaning(self) -> None:
        """Raise UsageError for a missing file, or an option that has no effect."""
        for reference in self.own_code.values():
            find_plugin_file(reference)
        if self.truncation and not (self.render or self.model):
            raise UsageError(
                "--truncation declares what --render or MODEL's template does: give one"
            )
        if self.features != "masked" and not (self.collator or self.packing):
            raise UsageError("--features are samples for --collator or --packing: give one")


class CheckReport(Record):
    """The report on one subject, or the reason why it has none."""

    level: DataLevel
    report: SubjectReport
    problem: str = ""
    """Exception of the subject, or a description of its malformed result."""


class DataAnswer(Record):
    """All reports, and the reasons why levels were left out."""

    checks: list[CheckReport]
    left_out: dict[DataLevel, str]
    notes: list[str] = Field(default_factory=list)
