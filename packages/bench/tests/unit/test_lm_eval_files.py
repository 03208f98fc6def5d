"""Reading the files of lm-eval's command line, whose targets can be read in several ways."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from assay.errors import UsageError
from assay.files import write_sealed
from assay.verdicts import Outcome
from assay_bench.comparing import SuiteTerms, Terms, compare
from assay_bench.comparison_files import verdict_of
from assay_bench.lm_eval_files import (
    Manifest,
    read_evaluation,
    write_manifest,
)
from assay_bench.results import Evaluation, judge_scores

STAMP = "2026-01-02T03-04-05.678901"
KINDS = {
    "choices": "multiple_choice",
    "endings": "loglikelihood",
    "texts": "loglikelihood_rolling",
    "sums": "generate_until",
}


def hashes(number: int) -> dict[str, str]:
    return {name: f"{name}{number}" for name in ("doc_hash", "prompt_hash", "target_hash")}


def sample(kind: str, number: int, **update: Any) -> dict[str, Any]:
    """A sample in the format of version 0.4.13: arguments as objects, numbers as text."""
    kinds: dict[str, dict[str, Any]] = {
        "choices": {
            "arguments": {
                "gen_args_0": {"arg_0": "2+2=", "arg_1": " 4"},
                "gen_args_1": {"arg_0": "2+2=", "arg_1": " five"},
            },
            "resps": [[["-1.5", "True"]], [["-9.0", "False"]]],
            "filtered_resps": [["-1.5", "True"], ["-9.0", "False"]],
            "target": "0",
            "metrics": ["acc", "acc_norm"],
            "acc": 1.0,
            "acc_norm": 1.0,
        },
        "endings": {
            "arguments": {"gen_args_0": {"arg_0": "an exc", "arg_1": "eption"}},
            "resps": [[["-3.0", "False"]]],
            "filtered_resps": [["-3.0", "False"]],
            "target": "eption",
            "metrics": ["acc"],
            "acc": 0,
        },
        "texts": {
            "arguments": {"gen_args_0": {"arg_0": "naïve"}},
            "resps": [["-12.0"]],
            "filtered_resps": ["-12.0"],
            "target": "naïve",
            "metrics": ["bits_per_byte"],
            "bits_per_byte": [-12.0, 6],
        },
        "sums": {
            "arguments": {"gen_args_0": {"arg_0": "2+2=", "arg_1": {"until": ["\n"]}}},
            "resps": [["5 or so"]],
            "filtered_resps": ["5"],
            "target": "4",
            "metrics": ["exact_match"],
            "exact_match": 0.0,
        },
    }
    document = {"doc": {"text": "of", "source": f"s{number % 2}"}, "doc_id": number}
    return kinds[kind] | document | hashes(number) | {"filter": "none"} | update


def numbered(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give each line of a filter its own doc_id, as lm-eval does."""
    seen: Counter[str] = Counter()
    found = []
    for line in lines:
        found.append(line | {"doc_id": seen[line["filter"]]})
        seen[line["filter"]] += 1
    return found


def write(folder: Path, samples: dict[str, list[dict[str, Any]]], **update: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "results": {name: {} for name in samples},
        "configs": {name: {"output_type": KINDS.get(name, "multiple_choice")} for name in samples},
        "versions": dict.fromkeys(samples, 1.0),
        "n-shot": dict.fromkeys(samples, 0),
        "model_name": "org/model",
    }
    (folder / f"results_{STAMP}.json").write_text(json.dumps(results | update))
    for name, lines in samples.items():
        text = "".join(json.dumps(line) + "\n" for line in numbered(lines))
        (folder / f"samples_{name}_{STAMP}.jsonl").write_text(text)
    return folder


def test_each_kind_of_task_is_read(tmp_path: Path) -> None:
    write(tmp_path / "org__model", {kind: [sample(kind, 0), sample(kind, 1)] for kind in KINDS})
    found = read_evaluation(tmp_path, {"choices": "source"})
    assert found.name == "org/model"
    choices, endings, texts, sums = (found.tasks[kind].items[0] for kind in KINDS)
    assert (choices.right, endings.right, texts.right, sums.right) == (True, False, None, False)
    assert choices.log_probability == pytest.approx(-0.75)
    assert (choices.target, choices.answer, choices.question) == ("4", "4", "2+2=")
    assert (choices.cluster, endings.cluster) == ("s0", None)
    assert endings.log_probability == pytest.approx(-0.5)
    assert texts.log_probability == pytest.approx(-2.0)  # six bytes
    assert (sums.log_probability, sums.answer) == (None, "5")
    assert [found.tasks[kind].metric for kind in KINDS] == ["acc", "acc", None, "exact_match"]
    assert [found.tasks[kind].chance for kind in KINDS] == [0.5, None, None, None]


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"model": "hf", "model_dtype": "torch.bfloat16"}, "model on hf/bfloat16"),
        ({"model": "vllm", "model_args": {"dtype": "float16"}}, "model on vllm/float16"),
        ({"model": "local-completions", "model_args": "a=b"}, "model on local-completions"),
        ({}, "model"),
    ],
)
def test_side_is_named_by_model_class_and_dtype(
    config: dict[str, object], name: str, tmp_path: Path
) -> None:
    write(tmp_path, {"sums": [sample("sums", 0)]}, config=config, model_name="/far/away/model")
    assert read_evaluation(tmp_path).name == name


def test_seeds_are_facts_of_the_verdict(tmp_path: Path) -> None:
    config = {"model": "hf", "random_seed": 0, "torch_seed": 1234, "device": "cpu"}
    found = read_evaluation(write(tmp_path, {"sums": [sample("sums", 0)]}, config=config))
    candidate = judge_scores(found).candidate
    assert candidate["seeds"] == {"random_seed": 0, "torch_seed": 1234}
    assert found.name == "org/model on hf"


def test_guess_of_a_text_is_read_per_byte(tmp_path: Path) -> None:
    write(tmp_path, {"texts": [sample("texts", 0, assay_guess=-18.0)]})
    (item,) = read_evaluation(tmp_path).tasks["texts"].items
    assert item.guess == pytest.approx(-3.0)  # six bytes


def test_right_choice_can_be_given_as_text(tmp_path: Path) -> None:
    write(tmp_path, {"choices": [sample("choices", 0, target="five", acc=0.0, acc_norm=0.0)]})
    (item,) = read_evaluation(tmp_path).tasks["choices"].items
    assert item.target == "five"
    assert item.log_probability == pytest.approx(-9 / 5)


STRICT, FLEX = "strict-match", "flexible-extract"


def filtered(folder: Path, *filters: str, num: int = 1) -> Evaluation:
    """Read a task whose answers have these filters, each right."""
    steps = [{"name": name, "filter": [{"function": name}]} for name in filters]
    config = {"sums": {"output_type": "generate_until", "filter_list": steps}}
    lines = [
        sample("sums", number, filter=name, exact_match=1.0)
        for name in filters
        for number in range(num)
    ]
    groups: dict[str, Any] = {"group_subtasks": {"sums": []}}
    return read_evaluation(write(folder, {"sums": lines}, configs=config, **groups))


def test_each_filter_of_a_task_is_a_task(tmp_path: Path) -> None:
    strict, flexible = ({"filter": name} for name in (STRICT, FLEX))
    lines = [sample("sums", 0, **strict), sample("sums", 0, **flexible, exact_match=1.0)]
    write(tmp_path, {"sums": lines})
    found = read_evaluation(tmp_path).tasks
    assert {name: one.accuracy for name, one in found.items()} == {
        "sums (strict-match)": 0.0,
        "sums (flexible-extract)": 1.0,
    }


def test_a_filter_is_paired_whatever_other_filters_the_task_has(tmp_path: Path) -> None:
    both, strict = (
        filtered(tmp_path / "a", STRICT, FLEX, num=200),
        filtered(tmp_path / "b", STRICT, num=200),
    )
    found = compare(both, strict, Terms())
    assert {one.name: one.judged for one in found.tasks} == {
        f"sums ({STRICT})": Outcome.PASS,
        f"sums ({FLEX})": Outcome.NOT_COMPARED,
    }
    (step,) = verdict_of(found).next_steps
    assert step.purpose == (
        "sums (flexible-extract): run the candidate again with this task, or judge what both sides have:"
        " --task 'sums (strict-match)'"
    )
    chosen = Terms(tasks=("sums (strict-match)",))
    assert compare(both, strict, chosen).judged is Outcome.PASS
    assert compare(strict, both, Terms()).judged is Outcome.PASS
    # Another definition of the same filter is another question.
    items = both.tasks[f"sums ({STRICT})"]
    other = replace(items, asked=items.asked | {"filter_list": []})
    changed = replace(strict, tasks={items.name: other})
    assert "filter_list" in str(compare(strict, changed, Terms()).tasks[0].problem)


def test_filters_of_a_task_are_no_group_and_count_each_document_once(tmp_path: Path) -> None:
    side = filtered(tmp_path, STRICT, FLEX, num=300)
    assert side.groups == {}
    verdict = verdict_of(compare(side, side, Terms()))
    assert (verdict.verdict, verdict.compared) == (Outcome.PASS, 300)
    grouped = replace(side, groups={"all": tuple(side.tasks)})
    found = compare(grouped, grouped, Terms())
    assert verdict_of(found).levels["group all"].compared == 300
    (measure,) = found.pools[0].measures
    assert (measure.num_items, measure.num_clusters) == (600, 300)
    assert str(verdict.headline).startswith("Not worse by the margin: 300 items")


def choices(document: int, *, right: bool = True, **update: Any) -> dict[str, Any]:
    nats = ("-1.5", "-9.0") if right else ("-9.0", "-1.5")
    resps = [[[one, "False"]] for one in nats]
    rights = {"acc": float(right), "acc_norm": float(right), "resps": resps}
    return sample("choices", document, **(rights | update))


NUM_DOCUMENTS, NUM_REPEATS = 25, 40
ALONE = [choices(number) for number in range(NUM_DOCUMENTS)]
FLIPPED = [choices(0, right=False), *ALONE[1:]]


def read(folder: Path, **samples: list[dict[str, Any]]) -> Evaluation:
    return read_evaluation(write(folder, samples))


def test_repeated_documents_decide_no_more_than_each_once(tmp_path: Path) -> None:
    outcomes = []
    for name, lines in (("base", ALONE), ("candidate", FLIPPED)):
        alone = read(tmp_path / name, task=lines)
        repeated = read(tmp_path / f"{name}-repeated", task=lines * NUM_REPEATS)
        assert repeated.tasks["task"].items == alone.tasks["task"].items
        outcomes.append((alone, repeated))
    (was, was_repeated), (now, now_repeated) = outcomes
    for base, candidate in ((was, was), (was, now)):
        assert compare(base, candidate, Terms()).judged is Outcome.NOT_COMPARED
    for base, candidate in ((was_repeated, was_repeated), (was_repeated, now_repeated)):
        found = compare(base, candidate, Terms())
        assert found.judged is Outcome.NOT_COMPARED
        told = "task: 1,000 documents, 25 of them distinct: documents with equal content or prompts count as one item"
        assert found.notes == (told,)
        assert told in judge_scores(base).notes


def test_one_flipped_answer_of_a_repeated_document_is_no_failure(tmp_path: Path) -> None:
    base, candidate = (
        read(tmp_path / name, one=lines * 12, two=lines * 12)
        for name, lines in (("base", ALONE), ("candidate", FLIPPED))
    )
    found = compare(base, candidate, Terms(accuracy=0.001))
    assert found.judged is Outcome.NOT_COMPARED
    # One document of both tasks: a chance of 1/2.
    accuracies = [one for part in found.parts for one in part.measures if one.name == "acc"]
    assert [one.p_worse for one in accuracies] == [1.0, 1.0, 1.0]  # Holm


def test_documents_with_equal_requests_are_one_item_whatever_their_order(tmp_path: Path) -> None:
    lines = [choices(n, prompt_hash=f"p{n % 10}") for n in range(30)]
    for name, given in (("base", lines), ("turned", lines[::-1])):
        items = read(tmp_path / name, task=given).tasks["task"].items
        assert len(items) == 10
        lowest = {min(f"doc_hash{n + step}" for step in (0, 10, 20)) for n in range(10)}
        assert {item.key for item in items} == lowest
    # Options decide too: some tasks have an empty prompt.
    for number, line in enumerate(lines):
        line["arguments"] = {"gen_args_0": {"arg_0": "", "arg_1": f" {number}"}} | {
            "gen_args_1": {"arg_0": "", "arg_1": " five"}
        }
    assert len(read(tmp_path / "options", task=lines).tasks["task"].items) == 30


def test_repeats_are_averaged_and_nan_in_one_of_them_remains(tmp_path: Path) -> None:
    task = read(tmp_path / "a", task=[choices(0), choices(0, right=False), choices(1)]).tasks[
        "task"
    ]
    assert task.scores["acc"].values == (0.5, 1.0)
    assert [item.right for item in task.items] == [False, True]
    assert [item.log_probability for item in task.items] == [-2.625, -0.75]  # two bytes
    nan = choices(0, resps=[[["nan", "False"]], [["-9.0", "False"]]])
    task = read(tmp_path / "b", task=[choices(0), nan]).tasks["task"]
    assert not task.items[0].is_finite
    assert not judge_scores(read(tmp_path / "b", task=[choices(0), nan])).passed


def test_number_of_all_documents_is_that_of_distinct_ones(tmp_path: Path) -> None:
    counts = {"sums": {"original": 3, "effective": 3}}
    lines = [sample("sums", 0), sample("sums", 0), sample("sums", 1)]
    write(tmp_path, {"sums": lines}, **{"n-samples": counts})
    assert read_evaluation(tmp_path).tasks["sums"].num_documents == 2


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        (["0", "7", "7"], "document 1: label '7' is not one of 2 choices (2 of 3 documents)"),
        (["C", "C", "C"], "document 0: label 'C' is not one of 2 choices (3 of 3 documents)"),
        (["five", "4"], "document 1: label '4' is not one of 2 choices (1 of 2 documents)"),
        (["0", "[0, 1]", "4"], "document 2: label '4' is not one of 2 choices (1 of 3 documents)"),
        (["0", "[0, 1]"], ""),
    ],
)
def test_samples_without_a_right_choice_are_not_compared(
    targets: list[str], told: str, tmp_path: Path
) -> None:
    is_right = [one in ("0", "[0, 1]") for one in targets]
    lines = [
        choices(n, target=one, acc=float(right), acc_norm=float(right))
        for n, (one, right) in enumerate(zip(targets, is_right, strict=True))
    ]
    found = read(tmp_path, task=lines)
    assert found.tasks["task"].problem.startswith(told)
    assert bool(found.tasks["task"].problem) == bool(told)
    if told:
        assert judge_scores(found).levels["task"].verdict is Outcome.NOT_COMPARED
        compared = compare(found, found, Terms(accuracy=0.9, log_probability=9.0))
        assert compared.judged is Outcome.NOT_COMPARED
        assert str(compared.tasks[0].problem).startswith(f"base: {told}")


def test_a_metric_that_a_task_turns_around_is_excluded_and_the_others_judge(tmp_path: Path) -> None:
    directions = {"task": {"acc": False, "acc_norm": True}}
    folder = write(tmp_path / "turned", {"task": ALONE}, higher_is_better=directions)
    turned, plain = read_evaluation(folder), read(tmp_path / "plain", task=ALONE)
    task = turned.tasks["task"]
    assert (task.problem, task.metric, set(task.scores)) == ("", "acc_norm", {"acc_norm"})
    why = (
        "higher_is_better: false of acc would judge a worse model as better; set it to true under metric_list in"
        " the task's YAML file"
    )
    told = f"task: acc is not judged: {why}"
    assert told in judge_scores(turned).notes
    terms = Terms(accuracy=0.9, log_probability=9.0)
    found = compare(turned, turned, terms)
    assert (found.judged, found.notes) == (Outcome.PASS, (told,))
    assert compare(turned, plain, terms).judged is Outcome.PASS
    # What the base can judge, and the candidate turned around, is missing.
    found = compare(plain, turned, terms)
    assert found.judged is Outcome.NOT_COMPARED
    assert found.tasks[0].problem == f"acc of the candidate is not judged: {why}"
    assert found.tasks[0].next_step == "judge a metric of both sides: --metric task=acc_norm"
    assert [one.judged for one in found.tasks[0].measures] == [Outcome.PASS] * 2


def later(folder: Path, task: str, **update: Any) -> None:
    """Write newer results of one task next to those in `folder`."""
    results = json.loads((folder / f"results_{STAMP}.json").read_text())
    update = {"configs": {task: {"output_type": KINDS[task]}}} | update
    (folder / "results_2027.json").write_text(json.dumps(results | update))
    (folder / f"samples_{task}_2027.jsonl").write_text(json.dumps(sample(task, 1)) + "\n")


@pytest.mark.parametrize("task", ["sums", "texts"])
def test_newest_results_are_read_and_older_ones_are_named(task: str, tmp_path: Path) -> None:
    write(tmp_path, {"sums": [sample("sums", 0)]})
    later(tmp_path, task)
    found = read_evaluation(tmp_path)
    assert list(found.tasks) == [task]
    note = (
        f"{tmp_path}: results_2027.json was read, older results were ignored: results_{STAMP}.json"
    )
    assert found.notes == (note,)
    assert note in judge_scores(found).notes
    assert note in compare(found, found, Terms()).notes
    assert read_evaluation(tmp_path / f"results_{STAMP}.json").notes == ()


def test_a_folder_of_two_models_is_refused_and_names_both(tmp_path: Path) -> None:
    for name in ("m1", "m2"):
        write(tmp_path / name, {"sums": [sample("sums", 0)]}, model_name=name)
    with pytest.raises(UsageError) as raised:
        read_evaluation(tmp_path)
    assert str(raised.value) == (
        f"{tmp_path}: it holds results of several models or folders; name one of: {tmp_path}/m1, {tmp_path}/m2"
    )
    assert read_evaluation(tmp_path / "m1").name == "m1"
    # `--output_path FILE.json` puts every model into one folder.
    later(tmp_path / "m1", "sums", model_name="m3")
    with pytest.raises(UsageError, match=r"name one of: .*/results_2026.*json, .*/results_2027"):
        read_evaluation(tmp_path / "m1")


def test_a_file_of_samples_or_of_perf_is_sent_to_what_reads_it(tmp_path: Path) -> None:
    write(tmp_path, {"sums": [sample("sums", 0), sample("sums", 1)]})
    samples = tmp_path / f"samples_sums_{STAMP}.jsonl"
    with pytest.raises(UsageError) as raised:
        read_evaluation(samples)
    assert (
        str(raised.value) == f"{samples}: samples alone are not results: name the folder {tmp_path}"
    )
    perf = tmp_path / "perf"
    perf.mkdir()
    (perf / "performance.json").write_text("{}")
    with pytest.raises(UsageError, match="results of `perf`: compare them with `assay bench ab`"):
        read_evaluation(perf)


def append(folder: Path, lines: Sequence[dict[str, Any]]) -> None:
    with (folder / f"samples_sums_{STAMP}.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_a_document_with_two_lines_is_refused(tmp_path: Path) -> None:
    lines = [sample("sums", number) for number in range(3)]
    folder = write(tmp_path, {"sums": lines})
    append(folder, [sample("sums", number, exact_match=1.0) for number in (1, 2)])
    with pytest.raises(UsageError) as raised:
        read_evaluation(folder)
    assert str(raised.value).endswith(
        "2 of 5 lines of filter none repeat a doc_id, first 1: lm-eval writes one line for each document"
    )


def test_other_filters_and_new_documents_of_equal_content_are_no_repeats(tmp_path: Path) -> None:
    lines = [sample("sums", 0, filter=name) for name in ("a", "a", "b", "b")]
    assert [one.num_repeats for one in read(tmp_path, sums=lines).tasks.values()] == [1, 1]


def test_a_number_of_samples_that_contradicts_the_results_is_refused(tmp_path: Path) -> None:
    counts = {"n-samples": {"sums": {"original": 400, "effective": 2}}}
    lines = [sample("sums", number) for number in range(3)]
    assert read_evaluation(write(tmp_path / "right", {"sums": lines[:2]}, **counts)).tasks
    for given in (lines, lines[:1]):
        folder = write(tmp_path / f"{len(given)}", {"sums": given}, **counts)
        with pytest.raises(
            UsageError, match=f"{len(given)} documents of filter none, the results say 2"
        ):
            read_evaluation(folder)
    # lm-eval counts the values of a metric, which may apply to some documents only.
    some = [*lines[:2], sample("sums", 2, metrics=[])]
    assert read_evaluation(write(tmp_path / "some", {"sums": some}, **counts)).tasks


def test_nan_likelihood_stays_nan(tmp_path: Path) -> None:
    lines = [sample("texts", 0, resps=[["nan"]], filtered_resps=["nan"])]
    write(tmp_path, {"texts": lines})
    (item,) = read_evaluation(tmp_path).tasks["texts"].items
    assert item.log_probability is not None
    assert math.isnan(item.log_probability)
    assert not item.is_finite


def cut_off(folder: Path) -> None:
    file = next(folder.glob("samples_*"))
    file.write_text(file.read_text()[:-20])


def without_hash(folder: Path) -> None:
    file = next(folder.glob("samples_*"))
    line = json.loads(file.read_text())
    del line["prompt_hash"]
    file.write_text(json.dumps(line))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: next(folder.glob("samples_*")).unlink(), "evaluate with --log_samples"),
        (lambda folder: next(folder.glob("samples_*")).write_text(""), "empty: the task"),
        (cut_off, ", line 1: not JSON: Expecting"),
        (without_hash, "sample 1 is not as lm-eval writes it: 'prompt_hash' is missing"),
        (lambda folder: next(folder.glob("results_*")).unlink(), "no results_*.json"),
        (lambda folder: next(folder.glob("results_*")).write_text("{}"), "results: it is missing"),
        (lambda folder: next(folder.glob("results_*")).write_text("["), "Invalid JSON"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, damage: Any, told: str) -> None:
    write(tmp_path, {"sums": [sample("sums", 0)]})
    damage(tmp_path)
    with pytest.raises(UsageError) as raised:
        read_evaluation(tmp_path)
    assert told in str(raised.value)
    assert str(tmp_path) in str(raised.value)


def test_samples_that_contradict_the_results_are_refused(tmp_path: Path) -> None:
    lines = [sample("sums", 0), sample("sums", 1, exact_match=1.0)]
    stated = {"sums": {"exact_match,none": 0.5, "exact_match_stderr,none": "N/A"}}
    assert read_evaluation(write(tmp_path / "right", {"sums": lines}, results=stated)).tasks
    stated["sums"]["exact_match,none"] = 0.51
    folder = write(tmp_path / "wrong", {"sums": lines}, results=stated)
    with pytest.raises(
        UsageError, match=r"its samples give exact_match,none 0\.5, the results say"
    ):
        read_evaluation(folder)


def test_missing_field_of_a_cluster_is_named_with_the_known_ones(tmp_path: Path) -> None:
    write(tmp_path, {"sums": [sample("sums", 0)]})
    with pytest.raises(UsageError) as caught:
        read_evaluation(tmp_path, {"sums": "sauce"})
    assert str(caught.value) == (
        "cluster sums=sauce: document 1 has no field sauce, only text, source"
    )


def test_number_of_all_documents_is_read(tmp_path: Path) -> None:
    counts = {"sums": {"original": 500, "effective": 1}}
    write(tmp_path, {"sums": [sample("sums", 0)]}, **{"n-samples": counts})
    assert read_evaluation(tmp_path).tasks["sums"].num_documents == 500


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The folder of a run of `assay bench run`."""
    task = write(tmp_path / "tasks" / "sums", {"sums": [sample("sums", 0), sample("sums", 1)]})
    write_manifest(tmp_path, {"sums": task / f"results_{STAMP}.json"})
    return tmp_path


def test_a_finished_run_is_read_by_its_manifest(finished: Path) -> None:
    assert len(read_evaluation(finished).tasks["sums"].items) == 2


def test_a_finished_run_records_its_suite(tmp_path: Path) -> None:
    task = write(tmp_path / "tasks" / "sums", {"sums": [sample("sums", 0)]})
    terms = Terms(metrics={"sums": ("exact_match",)})
    suite = SuiteTerms(name="s.toml", terms=terms, clusters={"sums": "source"})
    write_manifest(tmp_path, {"sums": task / f"results_{STAMP}.json"}, suite)
    found = read_evaluation(tmp_path)
    assert SuiteTerms.of(found) == suite
    assert found.tasks["sums"].items[0].cluster == "s0"


@pytest.mark.parametrize("pattern", ["tasks/*/results_*", "tasks/*/samples_*", "evaluation.json"])
def test_one_changed_character_of_a_finished_run_is_refused(finished: Path, pattern: str) -> None:
    (file,) = finished.glob(pattern)
    text = file.read_text()
    place = text.index("sums" if "results" in text else "naïve" if "naïve" in text else "2+2")
    file.write_text(text[:place] + "x" + text[place + 1 :])
    with pytest.raises(UsageError, match="was changed"):
        read_evaluation(finished)


def test_links_out_of_a_finished_run_are_refused(finished: Path, tmp_path: Path) -> None:
    (file,) = finished.glob("tasks/*/samples_*")
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="symbolic link"):
        read_evaluation(finished)
    outside = Manifest(results={"sums": "../x/results_1.json"}, files={"../x": "0"})
    write_sealed(finished / "evaluation.json", outside)
    with pytest.raises(UsageError, match=r"it names \.\./x, outside of its folder"):
        read_evaluation(finished)


@pytest.mark.parametrize(
    "update",
    [
        {"results": 1},
        {"configs": []},
        {"configs": {}},
        {"configs": {"sums": 1}},
        {"configs": {"a/../b": {"output_type": "generate_until"}}},
        {"versions": 1},
        {"n-shot": "x"},
        {"assay": []},
        {"assay": {"name": "without the number of calls that gave NaN"}},
        {"assay": {"clusters": 1}, "configs": {"absent": {}}},
    ],
)
def test_malformed_results_are_an_error(tmp_path: Path, update: Any) -> None:
    folder = write(tmp_path, {"sums": [sample("sums", 0)]}, **update)
    with pytest.raises(UsageError) as raised:
        read_evaluation(folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "update",
    [
        {"metrics": 1},
        {"arguments": 1},
        {"arguments": []},
        {"arguments": {"a": 1}},
        {"resps": 1},
        {"resps": [1]},
        {"target": []},
        {"doc_hash": None, "prompt_hash": None},
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_malformed_samples_are_an_error_or_read(tmp_path: Path, kind: str, update: Any) -> None:
    folder = write(tmp_path, {kind: [sample(kind, 0, **update)]})
    try:
        found = read_evaluation(folder)
    except UsageError as error:
        assert "\n" not in str(error)  # noqa: PT017 - either is right
    else:
        assert len(found.tasks[kind].items) == 1


CONTRADICTION = (
    "document 1: acc is 1.0, but the largest log-probability is that of choice 1, and the right choice is 0"
    " (1 of 25 documents): were they edited?"
)


def test_accuracy_that_contradicts_its_log_probabilities_is_named(tmp_path: Path) -> None:
    edited = choices(1, right=False, acc=1.0)
    base = read(tmp_path / "base", task=ALONE)
    candidate = read(tmp_path / "edited", task=[ALONE[0], edited, *ALONE[2:]])
    verdict = judge_scores(candidate)
    level = verdict.levels["task"]
    assert (level.verdict, level.reason) == (Outcome.NOT_COMPARED, CONTRADICTION)
    for was, now, side in ((base, candidate, "candidate"), (candidate, base, "base")):
        compared = verdict_of(compare(was, now, Terms()))
        assert (compared.verdict, compared.diagnosis) == (Outcome.NOT_COMPARED, None)
        assert compared.levels["task"].reason == f"{side}: {CONTRADICTION}"


@pytest.mark.parametrize("delimiter", [" ", ""])
def test_normalized_accuracy_that_contradicts_is_named(delimiter: str, tmp_path: Path) -> None:
    # " 4" and " five": -1.5 per character against -2.25, with the delimiter -0.75 against -1.8.
    config = {"task": {"output_type": "multiple_choice", "target_delimiter": delimiter}}
    for name, stored in (("right", 1.0), ("wrong", 0.0)):
        lines = [choices(0, acc_norm=stored), choices(1)]
        folder = write(tmp_path / name, {"task": lines}, configs=config)
        problem = read_evaluation(folder).tasks["task"].problem
        told = "document 0: acc_norm is 0.0, but the largest log-probability per character is that of choice 0,"
        assert problem.startswith(told) if name == "wrong" else not problem


def test_accuracy_of_a_task_with_its_own_code_need_not_follow_from_log_probabilities(
    tmp_path: Path,
) -> None:
    config = {"task": {"output_type": "multiple_choice", "process_results": "def own(): ..."}}
    lines = [choices(number, acc=0.0) for number in range(3)]
    task = read_evaluation(write(tmp_path, {"task": lines}, configs=config)).tasks["task"]
    assert not task.problem
    assert "log-probability" in task.unjudged


def test_repeated_choices_are_named(tmp_path: Path) -> None:
    arguments = {
        f"gen_args_{n}": {"arg_0": "2+2=", "arg_1": one} for n, one in enumerate([" 5", " 4", " 4"])
    }
    resps = [[["-9.0", "False"]], [["-1.5", "True"]], [["-1.5", "True"]]]
    double = choices(1, arguments=arguments, resps=resps, target="1")
    found = read(tmp_path, task=[*ALONE[:1], double])
    told = "document 1: choices 1 and 2 are equal (1 of 2 documents); lm-eval never counts the second as chosen"
    assert f"task: {told}" in judge_scores(found).notes
    assert f"task: {told}" in compare(found, found, Terms()).notes


def test_a_drop_next_to_a_missing_metric_is_not_called_nan(tmp_path: Path) -> None:
    base = read(tmp_path / "base", task=ALONE * 1)
    wrong = [choices(number, right=False) for number in range(NUM_DOCUMENTS)]
    candidate = read(tmp_path / "candidate", task=[one | {"metrics": ["acc"]} for one in wrong])
    verdict = verdict_of(compare(base, candidate, Terms()))
    assert (verdict.verdict, verdict.diagnosis) == (Outcome.FAIL, None)


def test_choices_about_an_image_are_read(tmp_path: Path) -> None:
    arguments = {
        f"gen_args_{number}": {"arg_0": "2+2=", "arg_1": text, "arg_2": {"visual": ["image"]}}
        for number, text in enumerate([" 4", " five"])
    }
    task = read(tmp_path, task=[choices(0, arguments=arguments, target="five", acc=0, acc_norm=0)])
    (item,) = task.tasks["task"].items
    assert item.target == "five"
    assert item.log_probability == pytest.approx(-9 / 5)


def test_values_whose_squares_overflow_are_not_judged(tmp_path: Path) -> None:
    task = read(tmp_path, sums=[sample("sums", 0, exact_match=1e200), sample("sums", 1)])
    assert task.tasks["sums"].unjudged["exact_match"].reason == "its values are not understood"
