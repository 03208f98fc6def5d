"""A case: one combination of what a training run can be asked for."""

import difflib
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, TypeVar, cast, get_args

from pydantic import ConfigDict, Field, field_serializer, model_validator

from assay.errors import UsageError
from assay.verdicts import Record

# How training is spread over cards: zero1 to zero3 are the stages of DeepSpeed's ZeRO.
Framework = Literal[
    "one-process", "ddp", "fsdp", "tensor-parallel", "pipeline", "zero1", "zero2", "zero3"
]

# Of the micro models, one for each kind of attention and of feed-forward layer.
Family = Literal["llama", "mistral", "gemma2", "mixtral"]

# float16 is with float32 weights beside, and a loss scale.
Precision = Literal["float32", "bfloat16", "float16"]

# `offload` keeps weights, gradients and moments on the host; `accumulation` makes a step of more
# micro-batches than there are ranks; `compile` is torch.compile of every decoder layer.
Feature = Literal["lora", "offload", "recompute", "accumulation", "compile"]

# Micro-batches padded to one length, or their rows laid end to end with positions that begin anew.
Batches = Literal["padded", "packed"]

# What is saved, read back and compared: the state in one file or in one of each rank; the model as
# users load it; the adapter by itself, or merged into the model's weights.
Checkpoint = Literal["full", "sharded", "hugging-face", "adapter", "merged"]

# Whether the run is interrupted where it is planned, or by SIGTERM in the middle of a step.
Interruption = Literal["planned", "sigterm"]


def state_checkpoint(framework: Framework) -> Checkpoint:
    """How `framework` saves what a resume needs: what a case saves that asks for nothing else."""
    return "full" if framework in ("one-process", "ddp") else "sharded"


class CaseIdError(UsageError):
    """An id that is that of no case."""

    @classmethod
    def of(cls, case_id: str, problem: str, nearest: str) -> "CaseIdError":
        """`nearest`: the id that was probably meant."""
        return cls(f"no case is called {case_id!r}: {problem}; the nearest is {nearest}")


class Case(Record):
    """One combination; a default is what `id` does not name.

    cards: how many ranks train, each on a card of its own where there are cards.
    checkpoint: by default the one that the framework resumes from.
    """

    model_config = ConfigDict(frozen=True)

    framework: Framework
    cards: int = Field(ge=1)
    family: Family = "llama"
    precision: Precision = "float32"
    features: frozenset[Feature] = frozenset()
    batches: Batches = "padded"
    checkpoint: Checkpoint = "full"
    interruption: Interruption = "planned"

    @model_validator(mode="before")
    @classmethod
    def _choose_checkpoint(cls, given: Any) -> Any:  # noqa: ANN401 - what pydantic is given
        if not isinstance(given, dict) or "checkpoint" in given or "framework" not in given:
            return given
        return given | {"checkpoint": state_checkpoint(given["framework"])}

    @field_serializer("features")
    def _in_order(self, features: frozenset[Feature]) -> list[Feature]:
        return [feature for feature in get_args(Feature) if feature in features]

    @cached_property
    def id(self) -> str:
        """As in `fsdp-2-lora-offload`: what is not by default, in the order of the fields."""
        return "-".join([self.framework, str(self.cards), *self._words])

    @property
    def _words(self) -> list[str]:
        words: dict[str, str] = {
            "llama": self.family,
            "float32": self.precision,
            **{f"no {name}": name for name in get_args(Feature) if name in self.features},
            "padded": self.batches,
            state_checkpoint(self.framework): self.checkpoint,
            "planned": self.interruption,
        }
        return [word for default, word in words.items() if word != default]


# The field that each word of an id belongs to.
_FIELDS: Mapping[str, str] = {
    word: field
    for field, values in (
        ("family", get_args(Family)),
        ("precision", get_args(Precision)),
        ("features", get_args(Feature)),
        ("batches", get_args(Batches)),
        ("checkpoint", get_args(Checkpoint)),
        ("interruption", get_args(Interruption)),
    )
    for word in values
}
_Word = TypeVar("_Word", bound=str)
_ID = re.compile(r"(?P<framework>.+?)-(?P<cards>\d{1,6})(?:-(?P<words>.+))?")


def case_of(case_id: str) -> Case:
    """The case whose `id` is `case_id`.

    Raises: CaseIdError, which names the nearest id, for anything else.
    """
    matched = _ID.fullmatch(case_id)
    if matched is None and case_id.endswith(".toml"):
        raise UsageError(
            f"{case_id} is no case; a file that describes a library is command:{case_id}"
        )
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
    # The only word of an id with a hyphen.
    words = (matched["words"] or "").replace("hugging-face", "hugging_face").split("-")
    for written in filter(None, words):
        word = _known(written.replace("_", "-"), tuple(_FIELDS), problems)
        if _FIELDS[word] == "features":
            fields["features"].add(word)
        else:
            fields[_FIELDS[word]] = word
    case = Case(**fields)
    if case.id != case_id:
        what = "; ".join(problems) or "words stand once, in the order of the fields, not defaults"
        raise CaseIdError.of(case_id, what, case.id)
    return case


def _known(word: str, words: tuple[_Word, ...], problems: list[str]) -> _Word:
    """`word` where it is one of `words`, else the nearest of them; `problems` then says so."""
    nearest = _nearest(word, words)
    if nearest != word:
        problems.append(f"{word!r} is none of its words")
    return nearest


def _nearest(word: str, words: tuple[_Word, ...]) -> _Word:
    (nearest,) = difflib.get_close_matches(word, words, n=1, cutoff=0.0)
    return words[words.index(cast("_Word", nearest))]
