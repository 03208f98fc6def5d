"""Fuzzed readers of this package: evaluations, baselines, tunings, suites, recipes."""

import json
from pathlib import Path

from assay.files import read_sealed, write_sealed
from assay.runs.results import read_verdict
from assay_bench.comparing import Terms, compare
from assay_bench.comparison_files import (
    MARKDOWN_FILE,
    accept,
    read_sides,
    verdict_of,
    write_comparison,
)
from assay_bench.lm_eval_files import read_evaluation, write_manifest
from assay_bench.run_tasks import load_task, read_suite
from assay_bench.tuning.rank_tasks import read_texts
from assay_bench.tuning.records import (
    RECORD_FILE,
    TuningRecord,
    read_recipe,
)
from assay_bench.tuning.running import judge_tunings
from packages.bench.tests.unit.sample_evaluations import evaluation, item, task
from packages.bench.tests.unit.test_lm_eval_files import KINDS, STAMP, sample
from packages.bench.tests.unit.test_lm_eval_files import write as write_lm_eval
from packages.bench.tests.unit.tuning.test_running import tuning
from packages.core.tests.fuzz.reader import Reader

_NUM_TUNINGS = 2

_TASK = """
task: sums
dataset_path: json
dataset_kwargs:
  data_files:
    test: documents.jsonl
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["\\n"]
metric_list:
  - metric: exact_match
    aggregation: mean
"""
_SUITE = """
tasks = ["sums.yaml", "addition"]
fewshot = 2

[clusters]
addition = "source"

[terms]
accuracy = 0.03
log_probability = 0.01
"""
_RECIPE = """
models = ["micro:llama"]
run = "cpu/float32"
seeds = [0]
steps = 6
batch_size = 8
sequence_length = 16
checkpoint_every = 3

[[data]]
source = "documents.jsonl"
share = 7

[[data]]
source = "documents.txt"

[permutations.full]
learning_rate = 2e-3

[permutations.lora]
features = ["lora"]
learning_rate = 5e-3
"""


def _write_evaluation(folder: Path) -> None:
    write_lm_eval(folder, {kind: [sample(kind, 0), sample(kind, 1)] for kind in KINDS})


def _compare_with_itself(folder: Path) -> object:
    """Read an evaluation and compare it, as `assay bench compare` does."""
    found = read_evaluation(folder, {"choices": "source"})
    comparison = compare(found, found, Terms(accuracy=0.02))
    return comparison, verdict_of(comparison).to_json()


def _write_own_evaluation(folder: Path) -> None:
    results = {}
    for kind in KINDS:
        write_lm_eval(folder / kind, {kind: [sample(kind, 0), sample(kind, 1)]})
        results[kind] = folder / kind / f"results_{STAMP}.json"
    write_manifest(folder, results)


def _write_baseline(folder: Path) -> None:
    items = [
        item(n, right=n % 2 == 0, log_probability=-n / 7, cluster=f"c{n % 3}") for n in range(9)
    ]
    terms = Terms(accuracy=0.02)
    accept(evaluation(task(items)), folder / "base.json", terms, by="A. L.", reason="first")


def _compare_baselines(folder: Path) -> object:
    base = folder / "base.json"
    write_comparison(*read_sides(base, base, {}), Terms(accuracy=0.02), folder)
    text = (folder / MARKDOWN_FILE).read_text(encoding="utf-8")
    return text, read_verdict(folder).levels


def _write_tuning(folder: Path) -> None:
    write_sealed(folder / RECORD_FILE, tuning(3.0, 2.0))


def _judge_tuning(folder: Path) -> object:
    read = read_sealed(TuningRecord, folder / RECORD_FILE)
    return read, judge_tunings([read])


def _write_suite(folder: Path) -> None:
    (folder / "suite.toml").write_text(_SUITE)
    (folder / "sums.yaml").write_text(_TASK)
    documents = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(3)]
    (folder / "documents.jsonl").write_text("".join(json.dumps(one) + "\n" for one in documents))


def _read_suite(folder: Path) -> object:
    """Read a suite and its tasks, as `assay bench run` does first."""
    suite = read_suite(str(folder / "suite.toml"))
    return suite, [load_task(one, folder / "documents") for one in suite.tasks]


def _write_recipe(folder: Path) -> None:
    (folder / "recipe.toml").write_text(_RECIPE)
    texts = [f"document number {n}" for n in range(100)]
    (folder / "documents.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    (folder / "documents.txt").write_text("\n\n".join(texts))


def _read_recipe(folder: Path) -> object:
    recipe, sources = read_recipe(str(folder / "recipe.toml"))
    return recipe.hash, read_texts(recipe, sources)


READERS = (
    Reader("evaluation", _write_evaluation, _compare_with_itself),
    Reader("own-evaluation", _write_own_evaluation, _compare_with_itself, sealed=True),
    Reader("baseline", _write_baseline, _compare_baselines, sealed=True),
    Reader("tuning", _write_tuning, _judge_tuning, sealed=True),
    Reader("suite", _write_suite, _read_suite),
    Reader("recipe", _write_recipe, _read_recipe),
)  # fmt: skip
