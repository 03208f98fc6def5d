"""Pairs of dumps of correct runs: no comparison may fail."""

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from assay.comparison.check import CompareOptions, compare_dumps
from assay.dumps.protocol import Dump
from assay.dumps.recognizing import open_dump
from assay.inputs import BatchOptions
from assay.runs import SilentProgress
from assay.verdicts import Outcome, Verdict
from packages.core.tests.false_alarms.parts import Part
from packages.core.tests.false_alarms.variants import SETUPS
from packages.core.tests.trials.model_dumps import DumpTask, Format, write_dump
from packages.core.tests.trials.offline_memory import Memory, read_once
from packages.core.tests.trials.tables import markdown_table, number
from packages.core.tests.trials.trial import run_all
from packages.core.tests.unit.comparison.test_importing_ranks import on_ranks, tensor_parallel

RECIPES = ("llama", "mistral", "gemma2", "mixtral", "bert")
DTYPES = ("float32", "bfloat16", "float16")
TEXTS = (
    "The noise of a correct run",
    "def add(a, b):\n    return a + b",
    "3.14159",
    "Der Fehler liegt im zweiten Block.",
)
PLAIN = "as it comes"
YARDSTICK = "float64"
BATCHES = {"each prompt alone": 1, "two prompts at a time": 2}
# Ways to run that every recipe has, and more of single ones.
WAYS = (PLAIN, "two threads", *BATCHES, "without mkldnn", "exact sums", "fused norms")
MORE_WAYS = {
    "llama": ("two ranks", "attention in parts", "sums backwards", "eager attention"),
    "mistral": ("two ranks", "attention in parts", "sums backwards", "eager attention"),
    "gemma2": ("two ranks", "sums backwards"),
    "mixtral": ("two ranks", "attention in parts", "eager attention", "eager experts"),
    "bert": ("biases added last", "eager attention", "attention in parts"),
}


@dataclass(frozen=True)
class Pair:
    """Two runs of one recipe. Each is `WAY DTYPE`, and the name of its dump.

    noise: the run that says what noise is; "" for none.
    trusted: whether ACTUAL is replayed as well.
    num_ranks: over which ACTUAL is divided.
    """

    recipe: str
    expected: str
    actual: str
    noise: str = ""
    trusted: bool = False
    num_ranks: int = 1

    @property
    def name(self) -> str:
        """Unique among the pairs."""
        ranks = f" on {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        how = " with --noise" * bool(self.noise) + " with --model" * self.trusted
        return f"{self.recipe}: {self.expected} against {self.actual}{ranks}{how}"

    @property
    def format(self) -> Format:
        """The format of its dumps: either for about half of the pairs."""
        return "assay" if len(self.actual) % 2 else "msprobe"


@dataclass(frozen=True)
class Judged:
    """A pair and the verdict on it."""

    pair: Pair
    verdict: Verdict

    @property
    def reason(self) -> str:
        """The reason for a verdict other than PASS."""
        levels = self.verdict.levels.items()
        texts = [f"{name}: {one.reason}" for name, one in levels if one.verdict is not Outcome.PASS]
        return "; ".join(texts)


@dataclass(frozen=True)
class Work:
    """The pairs of one recipe and dtype."""

    recipe: str
    dtype: str
    folder: Path


def pairs_of(recipe: str, dtype: str) -> Iterator[Pair]:
    """Every pair whose ACTUAL has this dtype."""
    plain, yardstick = f"{PLAIN} {dtype}", f"{YARDSTICK} {dtype}"
    # BERT counts positions from the left, padding included: another batch is another computation.
    left_out = BATCHES if recipe == "bert" else {}
    ways = [f"{way} {dtype}" for way in (*WAYS, *MORE_WAYS[recipe]) if way not in left_out]
    for way in ways:
        yield Pair(recipe, plain, way)
        if way != plain:
            yield Pair(recipe, yardstick, way, plain)
    for way in (ways[2], ways[-1]):
        yield Pair(recipe, yardstick, way, plain, trusted=True)
        yield Pair(recipe, plain, way, trusted=True)
    if recipe != "bert":
        yield Pair(recipe, plain, f"two ranks {dtype}", num_ranks=2)
        yield Pair(recipe, yardstick, f"two ranks {dtype}", plain, num_ranks=2)
    if dtype != "float32":
        yield Pair(recipe, f"{PLAIN} float32", plain)
        yield Pair(recipe, f"{PLAIN} float32", ways[2])


def all_pairs() -> list[Pair]:
    """Every pair."""
    return [pair for recipe in RECIPES for dtype in DTYPES for pair in pairs_of(recipe, dtype)]


def judge(work: Work) -> list[Judged]:
    """Write the dumps of a recipe and dtype, and compare them."""
    pairs = list(pairs_of(work.recipe, work.dtype))
    runs = {run for pair in pairs for run in (pair.expected, pair.actual)}
    for run in sorted(runs):
        _write(work, run)
    memory = Memory()
    found = []
    for pair in pairs:
        with memory.active():
            found.append(Judged(pair, _compare(pair, work.folder)))
    shutil.rmtree(work.folder)
    return found


def _write(work: Work, run: str) -> None:
    way, _, dtype = run.rpartition(" ")
    is_plain = way in (PLAIN, YARDSTICK, *BATCHES)
    options = BatchOptions(batch_size=BATCHES.get(way, 4), max_new_tokens=6)
    task = DumpTask(work.recipe, dtype, work.folder / run, options, texts=TEXTS)
    if way == YARDSTICK:
        task = replace(task, dtype=YARDSTICK, rounded_to=dtype)
    if not is_plain:
        task = replace(task, setup=f"{SETUPS}:{way.replace(' ', '_')}")
    write_dump(task)


def _compare(pair: Pair, folder: Path) -> Verdict:
    expected, actual, noise = (
        _open(folder / run / pair.format) if run else None
        for run in (pair.expected, pair.actual, pair.noise)
    )
    assert expected is not None
    assert actual is not None
    if pair.num_ranks > 1:
        actual = on_ranks(actual, tensor_parallel(pair.num_ranks))
    comparison = CompareOptions(
        str(expected.path),
        str(actual.path),
        model=f"micro:{pair.recipe}" if pair.trusted else None,
        noise=str(noise.path) if noise else None,
    )
    return compare_dumps(comparison, expected, actual, SilentProgress(), noise).verdict


def _open(folder: Path) -> Dump:
    return read_once(open_dump(folder))


def judge_all(wanted: str, part: Part, folder: Path) -> list[Judged]:
    """Judge the pairs of all recipes and dtypes whose `RECIPE DTYPE` contains `wanted`."""
    works = [
        Work(recipe, dtype, folder / f"{recipe}-{dtype}")
        for recipe in RECIPES
        for dtype in DTYPES
        if wanted in f"{recipe} {dtype}"
    ]
    chosen = part.take(works, lambda work: work.folder.name)
    return [one for found in run_all(judge, chosen, 1) for one in found]


def pairs_table(judged: Sequence[Judged]) -> str:
    """One row for each kind of pair, over all recipes and dtypes."""
    head = ("EXPECTED", "ACTUAL", "judged by", "pairs", "PASS", "NOT_COMPARED", "FAIL")
    kinds: dict[tuple[str, str, str], Counter[Outcome]] = {}
    for one in judged:
        pair = one.pair
        sides = [run.rpartition(" ")[0] for run in (pair.expected, pair.actual)]
        if pair.expected.endswith("float32") and not pair.actual.endswith("float32"):
            sides[0] = "float32"
        sides[1] += f" on {pair.num_ranks} ranks" if pair.num_ranks > 1 else ""
        by = " and ".join(["noise"] * bool(pair.noise) + ["model"] * pair.trusted) or "dtype"
        kinds.setdefault((sides[0], sides[1], by), Counter())[one.verdict.verdict] += 1
    outcomes = (Outcome.PASS, Outcome.NOT_COMPARED, Outcome.FAIL)
    rows = [
        (*kind, str(counts.total()), *(str(counts[outcome]) for outcome in outcomes))
        for kind, counts in sorted(kinds.items())
    ]
    return markdown_table(head, rows)


def pairs_totals(judged: Sequence[Judged]) -> str:
    """Return the number of pairs with each verdict, in a sentence."""
    counts = Counter(one.verdict.verdict for one in judged)
    return (
        f"Of {len(judged)} pairs of correct dumps {counts[Outcome.PASS]} pass,"
        f" {counts[Outcome.NOT_COMPARED]} are NOT_COMPARED and {counts[Outcome.FAIL]} fail."
    )


def describe_all(judged: Sequence[Judged], outcome: Outcome) -> list[str]:
    """Return the pairs with this verdict, each with the reason."""
    return [
        f"{one.pair.name}: {one.verdict.headline} {one.reason}"
        f" {one.verdict.statistic} {number(one.verdict.noise_ratio)}"
        for one in judged
        if one.verdict.verdict is outcome
    ]
