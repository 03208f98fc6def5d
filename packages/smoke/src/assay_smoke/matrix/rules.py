"""Cases of the smoke matrix: the axes, the combinations that are refused, and the cases that remain for a plan.

A case has one word per axis. The number of cards is such a word. A feature is "no" or its own name.
A rule refuses the cases that have one of its words on every axis that it names. It cites a test or page that
shows why. The rules for all machines are in rules.toml, those for the cards of one vendor in vendors.toml, and
the cases of a plan in cases.toml.
"""

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import combinations, product
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import AfterValidator, ConfigDict, Field, field_serializer, model_validator

from assay.devices.run_string import find_vendor_name
from assay.errors import UsageError
from assay.files import read_toml
from assay.output.streams import print_text
from assay.verdicts import SCHEMA, Record

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

    def __post_init__(self) -> None:
        if self.trainer_feature is None and not self.options and self.micro_batches == 1:
            raise ValueError(f"the feature {self.meaning!r} changes nothing in a run")


# All that a new feature needs: its axis, its word in ids and its effect on training derive from this.
FEATURES: Mapping[str, FeatureEntry] = {
    "lora": FeatureEntry(
        meaning="only an adapter is trained, the rest is frozen", options={"lora": True}
    ),
    "offload": FeatureEntry(
        meaning="weights, gradients and moments are kept on the host", trainer_feature="cpu-offload"
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
    ),
}


def _require_feature(name: str) -> str:
    if name not in FEATURES:
        raise ValueError(f"there is no feature {name!r}")
    return name


def state_checkpoint(framework: Framework) -> Checkpoint:
    """Return the checkpoint from which `framework` resumes, which is the default of a case."""
    return "full" if framework in ("one-process", "ddp") else "sharded"


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


_VALUES: Mapping[str, tuple[str, ...]] = {
    "family": get_args(Family),
    "precision": get_args(Precision),
    "features": tuple(FEATURES),
    "batches": get_args(Batches),
    "checkpoint": get_args(Checkpoint),
    "interruption": get_args(Interruption),
}
# The field of each word of an id.
_FIELDS = {word: field for field, words in _VALUES.items() for word in words}
# Words with hyphens come first, so that they are not taken apart.
_WORDS = re.compile(
    "".join(rf"(?<![^-]){re.escape(word)}(?![^-])|" for word in _FIELDS if "-" in word) + "[^-]+"
)
_ID = re.compile(r"(?P<framework>.+?)-(?P<cards>\d{1,6})(?:-(?P<words>.+))?")


def case_of(case_id: str) -> Case:
    """Parse an id.

    Raises: UsageError, which names the nearest id, for any other text.
    """
    if case_id.endswith(".toml"):
        file = case_id.rpartition(":")[2]
        raise UsageError(f"{case_id} is not a case; for a library's file write command:{file}")
    matched = _ID.fullmatch(case_id)
    framework = _nearest(matched["framework"] if matched else case_id, get_args(Framework))
    cards = 1 if framework == "one-process" else 2
    fields: dict[str, Any] = {"framework": framework, "cards": cards, "features": set()}
    if matched:
        fields["cards"] = max(1, int(matched["cards"]))
        for written in _WORDS.findall(matched["words"] or ""):
            word = _nearest(written, tuple(_FIELDS))
            if _FIELDS[word] == "features":
                fields["features"].add(word)
            else:
                fields[_FIELDS[word]] = word
    case = Case(**fields)
    if case.id != case_id:
        raise UsageError(
            f"no case is called {case_id!r}: an id is a framework, its number of cards, and words other than the"
            f" defaults, each once and in the order of `assay smoke plan`; the nearest is {case.id}"
        )
    return case


def _nearest(word: str, words: Sequence[str]) -> str:
    return difflib.get_close_matches(word, words, n=1, cutoff=0.0)[0]


# One card, the usual numbers of a machine, and the number between them.
CARDS = (1, 2, 4, 8)


class Axis(NamedTuple):
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


# The vendor of machines without an accelerator.
HOST = "cpu"

_FOLDER = Path(__file__).parent
_TESTS = "packages/smoke/tests/unit/matrix/test_refusals.py::"


@dataclass(frozen=True, slots=True)
class Rule:
    """A reason to refuse cases."""

    name: str
    refuses: Mapping[str, frozenset[str]]
    """Words by axis. A case with one of them on each of these axes is refused."""
    reason: str
    """One sentence for a user who asked for such a case."""
    shown_by: str
    """FILE::TEST of this repository, or an address."""

    def applies(self, words: Mapping[str, str]) -> bool:
        """Return whether the rule refuses the case with these words by axis."""
        return all(words[axis] in refused for axis, refused in self.refuses.items())


def refusing(*, name: str, reason: str, shown_by: str, **words: str | Iterable[str]) -> Rule:
    """Make a rule from one or several words per axis.

    Raises: ValueError for an unknown axis or word, since such a rule would refuse nothing.
    """
    known = {axis.name: axis.values for axis in AXES}
    refuses = {
        axis: frozenset([one] if isinstance(one, str) else one) for axis, one in words.items()
    }
    for axis, asked in refuses.items():
        if not asked or not asked <= {*known.get(axis, ())}:
            raise ValueError(f"rule {name}: the axis {axis} lacks some of {sorted(asked)}")
    return Rule(name, MappingProxyType(refuses), reason, shown_by)


def _read_rules(entries: Iterable[Mapping[str, Any]], prefix: str = "") -> tuple[Rule, ...]:
    """Make the rules of a file's entries. prefix: of their names."""
    return tuple(
        refusing(
            name=prefix + entry["name"],
            reason=entry["reason"],
            shown_by=entry["shown_by"] if "/" in entry["shown_by"] else _TESTS + entry["shown_by"],
            **entry["words"],
        )
        for entry in entries
    )


RULES = _read_rules(read_toml(_FOLDER / "rules.toml")["refuses"])


def check_compatible(case: Case, rules: Iterable[Rule] = RULES) -> str | None:
    """Return the reason of the first rule that refuses `case`, or None."""
    return next((rule.reason for rule in rules if rule.applies(case.words)), None)


@cache
def _tables() -> dict[str, dict[str, Any]]:
    return read_toml(_FOLDER / "vendors.toml")


def vendor_names() -> tuple[str, ...]:
    """Return the vendors in the order of their file."""
    return tuple(_tables())


def require_vendor(name: str) -> str:
    """Return the vendor that is called `name`. Raises: UsageError if it has no table."""
    vendor = find_vendor_name(name)
    if vendor not in _tables():
        raise UsageError(f"--vendor {name}: there is {', '.join(vendor_names())}")
    return vendor


def rules_of_vendor(vendor: str) -> tuple[Rule, ...]:
    """Return the rules for the vendor's cards alone; none for a vendor without a table."""
    return _read_rules(_tables().get(vendor, {}).get("refuses", ()), f"{vendor}-")


def rules_for(vendor: str) -> tuple[Rule, ...]:
    """Return all rules that hold on the vendor's cards."""
    return (*RULES, *rules_of_vendor(vendor))


# Two axes in the order of `AXES`, each with a word.
Pair = tuple[tuple[str, str], tuple[str, str]]

# one: one case per framework.
# pairwise: cases that together have every pair of words that any case has.
# full: every case.
Coverage = Literal["one", "pairwise", "full"]


def choose_cases(coverage: Coverage, cards: int, rules: Iterable[Rule]) -> list[Case]:
    """Return the cases with this coverage that use at most `cards` cards and that no rule refuses."""
    if coverage == "full":
        return list(_every_case(cards, rules))
    fitting = [case for case in _table()[coverage] if case.cards <= cards]
    possible = [case for case in fitting if check_compatible(case, rules) is None]
    return _without_redundant(possible) if coverage == "pairwise" else possible


def covered_pairs(cases: Iterable[Case]) -> set[Pair]:
    """Return the pairs of words in `cases`."""
    return {pair for case in cases for pair in combinations(case.words.items(), 2)}


@cache
def _table() -> dict[str, list[Case]]:
    listed = read_toml(_FOLDER / "cases.toml")
    return {coverage: [*map(case_of, ids)] for coverage, ids in listed.items()}


def _every_case(cards: int, rules: Iterable[Rule]) -> Iterator[Case]:
    for values in product(*(axis.values for axis in AXES)):
        words = dict(zip((axis.name for axis in AXES), values, strict=True))
        if int(words["cards"]) <= cards and not any(rule.applies(words) for rule in rules):
            features = {words.pop(name) for name in FEATURES} - {"no"}
            yield Case.model_validate(words | {"features": features})


def _without_redundant(cases: Iterable[Case]) -> list[Case]:
    """Take the cases that add a pair, then drop those whose pairs the later ones have as well."""
    taken: list[Case] = []
    for case in cases:
        if not covered_pairs([case]) <= covered_pairs(taken):
            taken.append(case)
    counts = Counter(pair for case in taken for pair in covered_pairs([case]))
    kept = []
    for case in taken:
        pairs = covered_pairs([case])
        if all(counts[pair] > 1 for pair in pairs):
            counts.subtract(pairs)
        else:
            kept.append(case)
    return kept


_WORD = re.compile(r"[\w:+.\[\]\\/-]+")


def compile_expression(text: str | None) -> Callable[[str], bool]:
    """Return a function that tests whether an id matches `text`, as all match None. Raises: UsageError."""
    if text is None:
        return lambda _: True

    def quote(word: re.Match[str]) -> str:
        is_operator = word[0] in ("and", "or", "not")
        return f" {word[0]} " if is_operator else f" {word[0].lower()!r} in name "

    try:
        is_safe = set(_WORD.sub("", text)) <= set("() ")
        code = compile(_WORD.sub(quote, text).strip() if is_safe else "", "-k", "eval")
        eval(code, {"name": ""})  # noqa: S307 - words are quoted
    except (SyntaxError, TypeError) as error:
        example = "write words of an id with and, or, not and parentheses, as in"
        raise UsageError(f"-k {text!r}: {example} -k 'fsdp and not (lora or 4)'") from error
    return lambda name: bool(eval(code, {"name": name.lower()}))  # noqa: S307 - words are quoted


class PlannedCase(Record):
    """A case that the session runs."""

    id: str
    case: Case
    new_pairs: int
    """Number of pairs of words that no earlier case has."""
    command: str
    """Command that repeats the case."""


class PairCount(Record):
    """Numbers of pairs of words in the plan and in any case."""

    covered: int
    possible: int
    uncovered: list[str]


class SmokePlan(Record):
    """The cases of a session, the most valuable first."""

    schema_: int = Field(default=SCHEMA, alias="schema")
    vendor: str
    cards: int
    coverage: Coverage
    cases: list[PlannedCase]
    pairs: PairCount
    notes: list[str]


def plan_smoke(
    vendor: str = HOST,
    cards: int = 4,
    coverage: Coverage = "pairwise",
    expression: str | None = None,
) -> SmokePlan:
    """Make the plan for a machine. No device is needed.

    cards: largest number of cards of a case. expression: selects case ids, in the syntax of `pytest -k`.

    Raises: UsageError for options without meaning, or that no case matches.
    """
    if cards < 1:
        raise UsageError(f"--cards {cards}: a plan needs at least one card")
    rules = rules_for(vendor)
    matches = compile_expression(expression)
    cases = [case for case in choose_cases(coverage, cards, rules) if matches(case.id)]
    if expression is not None and not cases:
        every = sum(matches(case.id) for case in choose_cases("full", cards, rules))
        elsewhere = f"{every:,} of all compatible cases match: --coverage full"
        raise UsageError(
            f"-k {expression!r}: no case of this plan (--coverage {coverage}) matches;"
            f" {elsewhere if every else 'no compatible case matches'}"
        )
    unknown = f"no limits of {vendor} cards are known: no rule excludes any case"
    covered: set[Pair] = set()
    planned = []
    for case in cases:
        new = covered_pairs([case]) - covered
        covered |= new
        command = f"assay smoke run {case.id}"
        planned.append(PlannedCase(id=case.id, case=case, new_pairs=len(new), command=command))
    possible = covered_pairs(choose_cases("pairwise", cards, rules))
    # As in "framework fsdp + lora no".
    uncovered = [
        " + ".join(word if word == axis else f"{axis} {word}" for axis, word in pair)
        for pair in sorted(possible - covered)
    ]
    return SmokePlan(
        schema=SCHEMA,
        vendor=vendor,
        cards=cards,
        coverage=coverage,
        cases=planned,
        pairs=PairCount(covered=len(covered), possible=len(possible), uncovered=uncovered),
        notes=[] if vendor == HOST or rules_of_vendor(vendor) else [unknown],
    )


# --json lists all.
_CASES_SHOWN = 100


def print_plan(planned: SmokePlan) -> None:
    """Print the cases and a summary. Lines stay unbroken, so that ids can be copied."""
    shown = planned.cases[:_CASES_SHOWN]
    pairs = [f"+{case.new_pairs}" if case.new_pairs else "" for case in shown]
    rows = zip(["PAIRS", *pairs], ["CASE", *(case.id for case in shown)], strict=True)
    lines = [f"{number:<5}  {case_id}" for number, case_id in rows]
    if (rest := len(planned.cases) - _CASES_SHOWN) > 0:
        lines.append(f"and {rest:,} more cases: --json lists all")
    lines += [f"note: {note}" for note in planned.notes]
    extent = f"{planned.pairs.covered} of {planned.pairs.possible} pairs of values that can meet"
    print_text("\n".join([*lines, "", f"{len(planned.cases):,} cases, {extent}"]))
