"""Cases of the smoke matrix: combinations of framework, cards, model, precision and features.

A case has one word per axis. The number of cards is such a word. A feature is "no" or its own name.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar, cast, get_args

from pydantic import AfterValidator, ConfigDict, Field, field_serializer, model_validator

from assay.errors import UsageError
from assay.verdicts import Record

# zero1 to zero3 are the stages of DeepSpeed's ZeRO.
Framework = Literal[
    "one-process", "ddp", "fsdp", "tensor-parallel", "pipeline", "zero1", "zero2", "zero3"
]

# Micro models, one for each kind of attention and of feed-forward layer.
Family = Literal["llama", "mistral", "gemma2", "mixtral"]

# float16 trains with float32 master weights and a loss scale.
Precision = Literal["float32", "bfloat16", "float16"]

# Micro-batches padded to one length, or rows laid end to end with restarting positions.
Batches = Literal["padded", "packed"]

# What is saved, read back and compared: the state in one file or in one file per rank, the model as
# users load it, the adapter alone, or the adapter merged into the weights.
Checkpoint = Literal["full", "sharded", "hugging-face", "adapter", "merged"]

# Whether the run stops between steps, or gets SIGTERM within one.
Interruption = Literal["planned", "sigterm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureEntry:
    """A feature of training: its axis has the words "no" and its name."""

    meaning: str
    """Description in the table of axes."""
    trainer_feature: str | None = None
    """Feature that the training plan asks the trainer for."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `TrainOptions`."""
    micro_batches: int = 1
    """Factor on the number of micro-batches in a step."""
    extra_seconds: float = 0.0
    """Rough estimate of the additional time of a case on two CPU cores."""

    def __post_init__(self) -> None:
        if self.trainer_feature is None and not self.options and self.micro_batches == 1:
            raise ValueError(f"the feature {self.meaning!r} changes nothing in a run")


# All that a new feature needs: its axis, its word in ids and its effect on training derive from this.
FEATURES: Mapping[str, FeatureEntry] = {
    "lora": FeatureEntry(
        meaning="only an adapter is trained, the rest is frozen", options={"lora": True}
    ),
    "offload": FeatureEntry(
        meaning="weights, gradients and moments are kept on the host",
        trainer_feature="cpu-offload",
    ),
    "recompute": FeatureEntry(
        meaning="activations are recomputed in backward", trainer_feature="recompute"
    ),
    "accumulation": FeatureEntry(meaning="a step has twice as many micro-batches", micro_batches=2),
    "compile": FeatureEntry(
        meaning="torch.compile of every decoder layer",
        trainer_feature="compile",
        # Every new shape is compiled again.
        options={"shapes": "equal-in-all-steps"},
        extra_seconds=10.0,
    ),
}


def _require_feature(name: str) -> str:
    if name not in FEATURES:
        raise ValueError(f"there is no feature {name!r}")
    return name


def state_checkpoint(framework: Framework) -> Checkpoint:
    """Return the checkpoint from which `framework` resumes, which is the default of a case."""
    return "full" if framework in ("one-process", "ddp") else "sharded"


class CaseIdError(UsageError):
    """An id that belongs to no case."""

    @classmethod
    def of(cls, case_id: str, problem: str, nearest: str) -> "CaseIdError":
        """Describe the problem and name the nearest valid id."""
        return cls(f"no case is called {case_id!r}: {problem}; the nearest is {nearest}")


class Case(Record):
    """One combination of the matrix. Its id leaves defaults out."""

    model_config = ConfigDict(frozen=True)

    framework: Framework
    cards: int = Field(ge=1)
    """Number of ranks, each on its own card if there are cards."""
    family: Family = "llama"
    precision: Precision = "float32"
    features: frozenset[Annotated[str, AfterValidator(_require_feature)]] = frozenset()
    batches: Batches = "padded"
    checkpoint: Checkpoint = "full"
    """Defaults to the one from which the framework resumes."""
    interruption: Interruption = "planned"

    @model_validator(mode="before")
    @classmethod
    def _choose_checkpoint(cls, given: Any) -> Any:  # noqa: ANN401 - any input of pydantic
        if not isinstance(given, dict) or "checkpoint" in given or "framework" not in given:
            return given
        return given | {"checkpoint": state_checkpoint(given["framework"])}

    @field_serializer("features")
    def _in_order(self, features: frozenset[str]) -> list[str]:
        return [feature for feature in FEATURES if feature in features]

    @cached_property
    def words(self) -> dict[str, str]:
        """Return the word on each axis, in the order of `AXES`."""
        fields = self.model_dump(exclude={"features"})
        fields |= {name: name if name in self.features else "no" for name in FEATURES}
        return {axis.name: str(fields[axis.name]) for axis in AXES}

    @cached_property
    def id(self) -> str:
        """Return the id, as in `fsdp-2-lora-offload`: non-default words in the order of the axes."""
        usual = {"llama", "float32", "no", "padded", state_checkpoint(self.framework), "planned"}
        return "-".join(word for word in self.words.values() if word not in usual)


# The field of each word of an id.
_FIELDS: Mapping[str, str] = {
    word: field
    for field, values in (
        ("family", get_args(Family)),
        ("precision", get_args(Precision)),
        ("features", tuple(FEATURES)),
        ("batches", get_args(Batches)),
        ("checkpoint", get_args(Checkpoint)),
        ("interruption", get_args(Interruption)),
    )
    for word in values
}
# Words with hyphens come first, so that they are not taken apart.
_WORDS = re.compile(
    "".join(rf"(?<![^-]){re.escape(word)}(?![^-])|" for word in _FIELDS if "-" in word) + "[^-]+"
)
_Word = TypeVar("_Word", bound=str)
_ID = re.compile(r"(?P<framework>.+?)-(?P<cards>\d{1,6})(?:-(?P<words>.+))?")


def case_of(case_id: str) -> Case:
    """Parse an id.

    Raises: CaseIdError, which names the nearest id, for any other text.
    """
    matched = _ID.fullmatch(case_id)
    if matched is None and case_id.endswith(".toml"):
        raise UsageError(f"{case_id} is not a case; for a library's file write command:{case_id}")
    if matched is None:
        framework = _nearest(case_id, get_args(Framework))
        nearest = Case(framework=framework, cards=1 if framework == "one-process" else 2)
        problem = "an id begins with a framework and its number of cards"
        raise CaseIdError.of(case_id, problem, nearest.id)
    problems: list[str] = []
    fields: dict[str, Any] = {"cards": int(matched["cards"]), "features": set()}
    if fields["cards"] < 1:
        problems.append("a case has at least one card")
        fields["cards"] = 1
    fields["framework"] = _known(matched["framework"], get_args(Framework), problems)
    for written in _WORDS.findall(matched["words"] or ""):
        word = _known(written, tuple(_FIELDS), problems)
        if _FIELDS[word] == "features":
            fields["features"].add(word)
        else:
            fields[_FIELDS[word]] = word
    case = Case(**fields)
    if case.id != case_id:
        what = (
            "; ".join(problems)
            or "each word stands once, in the order of the fields, and defaults are left out"
        )
        raise CaseIdError.of(case_id, what, case.id)
    return case


def _known(word: str, words: tuple[_Word, ...], problems: list[str]) -> _Word:
    """Return the nearest of `words`, and add a problem if it differs from `word`."""
    nearest = _nearest(word, words)
    if nearest != word:
        problems.append(f"there is no word {word!r}")
    return nearest


def _nearest(word: str, words: tuple[_Word, ...]) -> _Word:
    (nearest,) = difflib.get_close_matches(word, words, n=1, cutoff=0.0)
    return words[words.index(cast("_Word", nearest))]


# One card, the usual numbers of a machine, and the number between them.
CARDS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Axis:
    """An independent choice."""

    name: str
    values: tuple[str, ...]
    """Words, the plainest first."""
    meaning: str


AXES: tuple[Axis, ...] = (
    Axis("framework", get_args(Framework), "how training is spread over cards"),
    Axis("cards", tuple(map(str, CARDS)), "number of ranks, each on its own card"),
    Axis(
        "family", get_args(Family), "micro model, which decides the kinds of attention and layers"
    ),
    Axis("precision", get_args(Precision), "float16 has float32 master weights and a scaled loss"),
    *(Axis(name, ("no", name), entry.meaning) for name, entry in FEATURES.items()),
    Axis("batches", get_args(Batches), "padded to one length, or rows laid end to end"),
    Axis("checkpoint", get_args(Checkpoint), "what is saved, read back and compared"),
    Axis("interruption", get_args(Interruption), "between steps, or by SIGTERM within a step"),
)
