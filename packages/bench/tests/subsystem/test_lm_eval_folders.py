"""Folders that lm-eval 0.4.13 wrote: every kind of metric is read, and judged or named."""

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from assay.verdicts import Outcome
from assay_bench.comparing import Terms, compare
from assay_bench.lm_eval_files import read_evaluation
from assay_bench.results import Evaluation, TaskResult, judge_scores
from packages.bench.tests.lm_eval_folders import TASKS, write_folder

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

TERMS = Terms(accuracy=0.05, log_probability=0.02)
# One measure for metrics that depend on the same sum.
PERPLEXITIES = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
JUDGED = {
    "choices": {"acc", "acc_norm", "acc_bytes", "exact_match", "mcc", "brier_score"},
    "information": {"acc", "acc_mutual_info"},
    "numerals": {"acc"},
    "several": {"acc"},
    "pairs": {"acc", "f1", "mcc"},
    "contexts": {"acc"},
    "endings": {"acc", "perplexity"},
    "texts": {"perplexity"},
    "translations": {"bleu", "chrf", "chrf++", "ter"},
    "sums (first)": {"exact_match"},
    "sums (vote)": {"exact_match"},
    "own": {"refusal_rate", "overlap", "instructions", "hard_acc"},
}
LOG_PROBABILITIES = {"choices", "information", "numerals", "pairs", "contexts", "endings", "texts"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("lm-eval")
    damages: dict[str, Callable[[int], bool]] = {
        "base": lambda _: False,
        "worse": lambda number: number % 3 == 0 or number % 5 == 1,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        return {name: write_folder(folder / name, damaged) for name, damaged in damages.items()}


@pytest.fixture(scope="module")
def sides(folders: dict[str, Path]) -> dict[str, Evaluation]:
    return {name: read_evaluation(folder) for name, folder in folders.items()}


def test_each_metric_is_read_or_named(sides: dict[str, Evaluation]) -> None:
    for side in sides.values():
        assert {name: set(task.scores) for name, task in side.tasks.items()} == JUDGED
        assert {n for n, task in side.tasks.items() if "log-probability" in task.all_scores()} == (
            LOG_PROBABILITIES
        )
        unjudged = {(name, one) for name, task in side.tasks.items() for one in task.unjudged}
        # Of several right options, none is the right one.
        assert unjudged == {("own", "longest"), ("several", "log-probability")}


def test_means_are_the_metrics_that_lm_eval_wrote(
    folders: dict[str, Path], sides: dict[str, Evaluation]
) -> None:
    (file,) = folders["worse"].glob("results_*.json")
    stated = json.loads(file.read_text())["results"]
    num_compared = 0
    for name, task in sides["worse"].tasks.items():
        plain, _, filter_ = name.removesuffix(")").partition(" (")
        for metric, score in task.scores.items():
            if metric in PERPLEXITIES:
                continue
            assert score.mean == pytest.approx(stated[plain][f"{metric},{filter_ or 'none'}"])
            num_compared += 1
    assert num_compared == 25
    num_bits = -sides["worse"].tasks["texts"].scores["perplexity"].mean / math.log(2)
    assert num_bits == pytest.approx(stated["texts"]["bits_per_byte,none"])


def test_every_metric_of_the_worse_model_fails(sides: dict[str, Evaluation]) -> None:
    found = compare(sides["base"], sides["worse"], TERMS)
    failed = {
        task.name: {one.name for one in task.measures if one.judged is Outcome.FAIL}
        for task in found.tasks
    }
    for name, expected in JUDGED.items():
        log_probability = {"log-probability"} if name in LOG_PROBABILITIES else set()
        same = {"perplexity"} if name == "texts" else set()  # of whole texts, one measure
        assert failed[name] == (expected | log_probability) - same, name
    assert compare(sides["worse"], sides["base"], TERMS).judged is not Outcome.FAIL


def only(side: Evaluation, name: str) -> Evaluation:
    return dataclasses.replace(side, tasks={name: side.tasks[name]})


@pytest.mark.parametrize("name", [name for name in JUDGED if name != "own"])
def test_equal_model_passes(sides: dict[str, Evaluation], name: str) -> None:
    side = only(sides["base"], name)
    assert compare(side, side, TERMS).judged is Outcome.PASS


@pytest.mark.parametrize(
    ("name", "metric"), [(n, one) for n in JUDGED for one in sorted(JUDGED[n])]
)
def test_drop_of_a_single_metric_is_not_a_pass(
    sides: dict[str, Evaluation], name: str, metric: str
) -> None:
    base, worse = (sides[side].tasks[name] for side in ("base", "worse"))
    scores = base.scores | {metric: worse.scores[metric]}
    candidate = dataclasses.replace(base, scores=scores)
    found = compare(with_task(base), with_task(candidate), TERMS)
    assert [(m.name, m.judged) for m in found.tasks[0].measures if m.judged == "FAIL"] == [
        ("log-probability" if name == "texts" else metric, Outcome.FAIL)
    ]


def with_task(task: TaskResult) -> Evaluation:
    return Evaluation("model", {task.name: task})


def test_drop_of_a_metric_that_nobody_judges_is_not_compared(sides: dict[str, Evaluation]) -> None:
    base = sides["base"].tasks["own"]
    lower = dataclasses.replace(base.unjudged["longest"], value=1.5)
    worse = dataclasses.replace(base, unjudged={"longest": lower})
    found = compare(with_task(base), with_task(worse), Terms(accuracy=0.2))
    assert found.judged is Outcome.NOT_COMPARED
    assert "longest is worse (2 -> 1.5) and nobody judges it" in str(found.tasks[0].problem)
    missing = dataclasses.replace(base, unjudged={})
    assert compare(with_task(base), with_task(missing), Terms(accuracy=0.2)).judged is (
        Outcome.NOT_COMPARED
    )
    same = compare(with_task(base), with_task(base), Terms(accuracy=0.2))
    assert same.judged is Outcome.PASS
    assert any("longest is not judged" in note for note in same.notes)


def test_guesses_know_the_options(sides: dict[str, Evaluation]) -> None:
    chances = {name: task.chance for name, task in sides["base"].tasks.items() if task.chance}
    # acc_mutual_info asks for each option twice; two of four options of `several` are right.
    assert chances == {
        "choices": 0.25,
        "information": 0.25,
        "numerals": 0.25,
        "several": 0.5,
        "pairs": 0.5,
        "contexts": 0.5,
    }
    assert judge_scores(sides["base"]).passed


def test_groups_of_lm_eval_are_pooled(folders: dict[str, Path], tmp_path: Path) -> None:
    (file,) = folders["base"].glob("results_*.json")
    results = json.loads(file.read_text())
    results["group_subtasks"] = {"all": ["inner", "pairs"], "inner": ["numerals", "contexts"]}
    for sample in folders["base"].glob("samples_*"):
        (tmp_path / sample.name).write_bytes(sample.read_bytes())
    (tmp_path / file.name).write_text(json.dumps(results))
    side = read_evaluation(tmp_path)
    found = compare(side, side, TERMS)
    assert {pool.name: pool.members for pool in found.pools}["group all"] == (
        *("contexts", "numerals"),
        "pairs",
    )
    assert len(TASKS) == len(results["configs"])
