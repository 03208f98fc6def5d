"""The files of a comparison; hostile text in any record stays harmless in every output format."""

import io
import json
import math
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay.files import write_sealed
from assay.foreign_text import escape_output
from assay.output.console import open_text_console
from assay.report.junit import make_suite, render_junit
from assay.report.page.html import render_html
from assay.report.run_report import read_report
from assay.report.text_formats import print_report
from assay.runs import RunFolder
from assay.verdicts import Outcome
from assay_bench.comparing import Measure, Terms, choose_terms, compare
from assay_bench.comparison_files import (
    Acceptance,
    Baseline,
    comparison_as_markdown,
    measure_in_words,
    read_sides,
    sufficient_limit,
    verdict_of,
    write_comparison,
)
from assay_bench.paired_statistics import Differences
from assay_bench.performance.running import performance_table
from assay_bench.results import Score
from packages.bench.tests.unit.performance.sample_results import performance_result
from packages.bench.tests.unit.sample_evaluations import answered, evaluation, item, task
from packages.bench.tests.unit.test_comparing import TERMS, suite
from packages.bench.tests.unit.test_lm_eval_files import sample, write
from packages.bench.tests.unit.test_suite_terms import OFFLINE
from packages.core.tests.poison import (
    POISON,
    assert_harmless_markdown,
    assert_harmless_text,
    poisoned,
)

SHIPPED = Path(str(files("assay_bench"))) / "shipped"


@pytest.mark.parametrize(("candidate", "judged"), [("full", "PASS"), ("lora", "FAIL")])
def test_a_comparison_leaves_its_verdict_as_json_and_as_text(
    candidate: str, judged: str, tmp_path: Path
) -> None:
    base, other = (SHIPPED / f"micro-llama-{name}.json" for name in ("full", candidate))
    write_comparison(*read_sides(base, other, {}), Terms(), tmp_path)
    assert json.loads((tmp_path / "verdict.json").read_text())["verdict"] == judged
    assert judged in (tmp_path / "comparison.md").read_text()


def test_both_sides_of_each_measure_are_a_table_of_the_report(tmp_path: Path) -> None:
    base, candidate = evaluation(answered(400, 400)), evaluation(answered(390, 400))
    write_comparison(base, candidate, TERMS, tmp_path)
    report = read_report(tmp_path)
    (line,) = report.measures
    assert line == {
        "level": "sums", "measure": "acc", "base": "1", "candidate": "0.975", "difference": "-0.025",
        "low": line["low"], "high": line["high"], "confidence": "0.9", "margin": "0.02", "margin source": "",
        "p": "0.000976562", "items": "400", "clusters": "", "items needed": "", "verdict": "FAIL",
    }  # fmt: skip
    (numbers,) = json.loads((tmp_path / "verdict.json").read_text())["levels"]["sums"]["measures"]
    assert (numbers["low"], numbers["high"]) == pytest.approx((-0.0414, -0.015), abs=1e-4)
    assert (numbers["items"], numbers["items_needed"]) == (400, None)
    assert numbers["p"] == pytest.approx(0.5**10)
    (row,) = report.measurements
    assert (row.level, row.statistic, row.expected, row.actual) == ("sums", "acc", 1.0, 0.975)
    assert "<td>0.975</td>" in render_html(report)
    stream = io.StringIO()
    print_report(report, open_text_console(stream), None)
    assert "0.975" not in stream.getvalue()  # in percent


def test_equal_samples_are_named_wherever_they_lie(tmp_path: Path) -> None:
    told = "BASE and CANDIDATE hold equal samples: one run compared with itself, or two that agree in every bit"
    first, copy = (write(tmp_path / name, {"sums": [sample("sums", 0)]}) for name in "ab")
    other = write(tmp_path / "c", {"sums": [sample("sums", 0, filtered_resps=["6"])]})
    for candidate, is_same in ((first, True), (copy, True), (other, False)):
        found = write_comparison(*read_sides(first, candidate, {}), Terms(), tmp_path)
        assert (found.notes[:1] == (told,)) is is_same


FLOAT32 = {"model_dtype": "torch.float32", "model_args": {"dtype": "float32"}}
BFLOAT16 = {"model_dtype": "torch.bfloat16", "model_args": {"dtype": "bfloat16"}}
AUTO = {"model_dtype": "torch.float32", "model_args": {"dtype": "auto", "batch_size": 8}}
CACHED = {"use_cache": "cache"}
TOLD = "a response cache may have answered for the candidate"


@pytest.mark.parametrize(
    ("kind", "base", "candidate", "told"),
    [
        ("choices", FLOAT32, BFLOAT16, "dtype is 'bfloat16', base 'float32', model_dtype is 'torch.bfloat16'"),
        ("choices", FLOAT32, {"model_args": {"dtype": "float32", "load_in_8bit": True}},
         f"load_in_8bit is True, base None, but all log-probabilities are equal: {TOLD}"),
        ("texts", FLOAT32, BFLOAT16, TOLD),
        ("sums", FLOAT32 | CACHED, BFLOAT16 | CACHED, f"but all answers are equal: {TOLD}"),
        # Two dtypes may give equal texts.
        ("sums", FLOAT32, BFLOAT16, None),
        # One dtype, asked for in two ways, and settings that leave the numbers alone.
        ("choices", FLOAT32, AUTO, None),
        ("choices", FLOAT32 | CACHED, FLOAT32 | {"device": "cpu", "fewshot_seed": 7}, None),
        ("choices", {}, BFLOAT16, None),
    ],
)  # fmt: skip
def test_equal_answers_of_different_models_may_come_from_a_cache(
    tmp_path: Path,
    kind: str,
    base: dict[str, object],
    candidate: dict[str, object],
    told: str | None,
) -> None:
    samples = {kind: [sample(kind, number) for number in range(400)]}
    first, second = (
        write(tmp_path / f"{n}", samples, config=one) for n, one in enumerate((base, candidate))
    )
    found = write_comparison(*read_sides(first, second, {}), Terms(metrics={kind: ()}), tmp_path)
    (task,) = found.tasks or (None,)
    problem = str(task and task.problem)
    assert told in problem if told else TOLD not in problem
    is_noted = "use_cache" in base and "--use_cache of lm-eval was set" in found.notes[0]
    assert is_noted is ("use_cache" in base)


@pytest.mark.parametrize(
    ("name", "is_refused"),
    [("org/other", True), ("elsewhere/model", False)],  # the same folder under another path
)
def test_two_models_with_equal_log_probabilities_may_be_one_run(
    tmp_path: Path, name: str, is_refused: bool
) -> None:
    samples = {"choices": [sample("choices", number) for number in range(40)]}
    base, other = (
        write(tmp_path / one.replace("/", "-"), samples, model_name=one)
        for one in ("org/model", name)
    )
    (task,) = write_comparison(*read_sides(base, other, {}), Terms(), tmp_path).tasks
    assert (TOLD in str(task.problem)) is is_refused


@pytest.mark.parametrize(
    ("kind", "changed", "told"),
    [
        ("sums", {"exact_match": 1.0}, "3 documents have equal answers and other scores (exact_match): the scorers differ"),
        ("texts", {"bits_per_byte": [-12.0, 11]}, "3 documents have equal answers and other scores (bits_per_byte): the"),
        ("sums", {"exact_match": 0.25 + 1e-12}, None),  # rounding
        ("sums", {"exact_match": 1.0, "filtered_resps": ["4"]}, None),
        ("sums", {"exact_match": 1.0, "filtered_resps": ["5", "4"]}, None),  # of two answers, one is equal
    ],
)  # fmt: skip
def test_equal_answers_with_other_scores_are_not_compared(
    tmp_path: Path, kind: str, changed: dict[str, object], told: str | None
) -> None:
    lines = [sample(kind, n) | {"exact_match": 0.25} for n in range(40)]
    base = write(tmp_path / "base", {kind: lines})
    other = [one | changed if number < 3 else one for number, one in enumerate(lines)]
    candidate = write(tmp_path / "other", {kind: other})
    found = write_comparison(*read_sides(base, candidate, {}), Terms(), tmp_path)
    problems = [str(task.problem) for task in found.tasks]
    assert (told in problems[0]) if told else not any("scorers" in one for one in problems)
    assert not any("equal samples" in note for note in found.notes)


def test_settings_that_bound_what_a_model_reads_are_noted_next_to_a_failure(tmp_path: Path) -> None:
    long, short = (
        write(
            tmp_path / f"{length}",
            {
                "sums": [
                    sample("sums", n, exact_match=right, filtered_resps=[f"{right}"])
                    for n in range(99)
                ]
            },
            max_length=length,
            config={
                "model": "hf",
                "model_args": {"pretrained": f"far/{length}/model", "truncation": bool(right)},
            },
        )
        for length, right in ((512, 1.0), (40, 0.0))
    )
    found = write_comparison(*read_sides(long, short, {}), Terms(), tmp_path)
    assert found.judged is Outcome.FAIL
    assert found.notes == (
        "settings differ: max_length is 40, base 512; truncation is None, base True",
    )


def test_a_sample_without_a_value_of_its_metric_is_named(tmp_path: Path) -> None:
    lost = sample("choices", 1)
    del lost["acc"]
    folder = write(tmp_path, {"choices": [sample("choices", 0), lost]})
    with pytest.raises(UsageError, match=r"\.jsonl: line 2 \(doc_id 1\) has no acc$"):
        read_sides(folder, folder, {})


def test_a_pass_says_what_was_tested() -> None:
    # Two tasks of 500 and 250 items without a change.
    side = evaluation(answered(400, 500), replace(answered(200, 250), name="more"))
    terms = Terms(accuracy=0.02, significance=0.1)
    verdict = verdict_of(compare(side, side, terms))
    assert verdict.verdict == "PASS"
    assert verdict.headline == (
        "Not worse by the margin: 750 items exclude such a difference (error rate 10% per measure)."
    )


@pytest.mark.parametrize(
    ("num_documents", "limit"),
    [
        # (1.645 * sqrt(0.02 * 0.98) + 1.282 * sqrt(1 / 50))² / 0.02² = 423.5 for each task, and less for the pool.
        ((None, None), 424),
        ((1_000, 424), 424),
        ((1_000, 423), None),
    ],
)
def test_headline_names_the_one_limit_that_suffices(
    num_documents: tuple[int | None, int | None], limit: int | None
) -> None:
    parts = [
        replace(answered(50, 50), name=f"t{number}", num_documents=num)
        for number, num in enumerate(num_documents)
    ]
    found = compare(evaluation(*parts), evaluation(*parts), TERMS)
    advice = f": run both sides with --limit {limit}" if limit else ""
    assert verdict_of(found).headline == f"underpowered: too few items to decide{advice}."


def test_the_limit_of_a_pool_counts_the_documents_of_its_tasks() -> None:
    sizes = (60, 1_000, 1_000)
    parts = [
        replace(one, num_documents=size)
        for one, size in zip(suite(3, 0, 30, 30).tasks.values(), sizes, strict=True)
    ]
    side = evaluation(*parts)
    found = compare(side, side, TERMS)
    needed = found.pools[0].measures[0].items_needed
    assert needed is not None
    pool_alone = replace(
        found,
        tasks=tuple(
            replace(t, measures=tuple(replace(m, pool="all tasks") for m in t.measures))
            for t in found.tasks
        ),
    )
    # The first task has only 60 documents.
    assert sufficient_limit(pool_alone) == max(math.ceil(needed / 3), math.ceil((needed - 60) / 2))


def test_every_limit_names_what_set_it() -> None:
    terms, _ = choose_terms(evaluation(), evaluation(), None, OFFLINE)
    all_right, few = evaluation(answered(400, 400)), evaluation(answered(50, 50))
    excluded = compare(all_right, all_right, terms)
    assert str(verdict_of(excluded).headline).startswith(
        "Not worse by the margin of suite offline: 400 items"
    )
    for found, told in (
        (excluded, "a drop of 3 points is excluded"),
        (excluded, '"margin_source": "suite offline"'),
        (compare(few, few, terms), "cannot exclude a drop of 3 points, about"),
        (
            compare(evaluation(answered(100, 400)), all_right, terms),
            "higher by more than 3 points:",
        ),
    ):
        assert told in verdict_of(found).to_json()


def test_an_underpowered_comparison_has_one_name_everywhere(tmp_path: Path) -> None:
    for name, num_right in (("before", 100), ("after", 99)):
        side = evaluation(answered(num_right, 100))
        write_sealed(tmp_path / name, Baseline.of(side, ACCEPTED.acceptance))
    folder = RunFolder.create("bench compare", tmp_path / "compared").path
    sides = read_sides(tmp_path / "before", tmp_path / "after", {})
    write_comparison(*sides, Terms(), folder)
    report, stream = read_report(folder), io.StringIO()
    print_report(report, open_text_console(stream))
    junit = render_junit([make_suite(report, "compared")])
    assert "NOT_COMPARED" in (folder / "comparison.md").read_text()
    for text in ((folder / "verdict.json").read_text(), stream.getvalue(), render_html(report)):
        assert "NOT_COMPARED" in text
        assert "underpowered: acc 100.0% -> 99.0%" in " ".join(text.split()).replace("&gt;", ">")
    for text in (stream.getvalue(), junit):
        assert re.search(
            r"underpowered: too few items to decide: run both sides with --limit \d+\.", text
        )
    assert junit.count("<error") == junit.count('<error message="underpowered: ') == 1


@pytest.mark.parametrize(
    ("setup", "title"),
    [
        ("/far/damage.py:scale", "m on cpu/float32 with damage.py:scale against m on cpu/float32"),
        (None, "m on cpu/float32 (after) against m on cpu/float32 (before)"),
    ],
)
def test_sides_of_one_name_are_told_apart(setup: str | None, title: str, tmp_path: Path) -> None:
    for name, one in (("before", None), ("after", setup)):
        facts = {"model": "m", "run": "cpu/float32", "setup": one}
        side = replace(evaluation(answered(100, 100), name="m on cpu/float32"), facts=facts)
        write_sealed(tmp_path / name, Baseline.of(side, ACCEPTED.acceptance))
    folder = RunFolder.create("bench compare", tmp_path / "compared").path
    sides = read_sides(tmp_path / "before", tmp_path / "after", {})
    write_comparison(*sides, Terms(), folder)
    assert read_report(folder).explanation.title == f"NOT_COMPARED: {title}"


def test_a_failure_is_stated_once_and_names_the_lost_questions(tmp_path: Path) -> None:
    for name, num_right in (("before", 100), ("after", 50)):
        side = evaluation(answered(num_right, 100))
        write_sealed(tmp_path / name, Baseline.of(side, ACCEPTED.acceptance))
    folder = RunFolder.create("bench compare", tmp_path / "compared").path
    sides = read_sides(tmp_path / "before", tmp_path / "after", {})
    write_comparison(*sides, Terms(), folder)
    stream = io.StringIO()
    print_report(read_report(folder), open_text_console(stream))
    assert stream.getvalue().count("lower by more than chance") == 1
    lost = f"Next: read the questions that only the base got right: {folder}/comparison.md\n"
    assert lost in stream.getvalue()


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        (("x", ""), "base: `x`, candidate: `(empty)`"),
        (("x", "   "), "base: `x`, candidate: `␣␣␣`"),
        (("a b", "a  b"), "base: `a b`, candidate: `a␣␣b`"),
        ((" x", "x\n\t"), "base: `␣x`, candidate: `x⏎⇥`"),
    ],
)
def test_answers_that_differ_in_spaces_are_told_apart(answers: tuple[str, str], told: str) -> None:
    sides = [
        evaluation(task([replace(item(0, right=right), answer=answer)]))
        for right, answer in zip((True, False), answers, strict=True)
    ]
    assert told in comparison_as_markdown(compare(sides[0], sides[1], Terms()))


def test_a_failure_names_its_tasks_first_and_each_measure_on_a_line(tmp_path: Path) -> None:
    scores = {
        name: [
            Score(kind="yes-no", values=tuple(float(n < num) for n in range(400)))
            for num in (400, 300)
        ]
        for name in ("acc", "acc_norm", "acc_bytes")
    }
    sides = [
        evaluation(
            replace(answered(num, 400), scores={name: pair[place] for name, pair in scores.items()})
        )
        for place, num in enumerate((400, 300))
    ]
    write_comparison(sides[0], sides[1], TERMS, tmp_path)
    stream = io.StringIO()
    print_report(read_report(tmp_path), open_text_console(stream))
    lines = stream.getvalue().splitlines()
    assert lines[1] == "Worse by more than chance: sums."
    assert [line.split()[:2] for line in lines[2:5]] == [
        ["sums:", "acc"], ["acc_norm", "100.0%"], ["acc_bytes", "100.0%"],
    ]  # fmt: skip
    assert stream.getvalue().count("acc_norm 100.0% -> 75.0%") == 1


def test_sides_with_missing_documents_name_the_side_to_evaluate() -> None:
    verdict = verdict_of(compare(evaluation(answered(3, 4)), evaluation(answered(2, 3)), Terms()))
    assert verdict.levels["sums"].reason == (
        "the two sides answered different questions: 1 of the base's 4 documents are missing from the candidate"
    )
    assert list(map(str, verdict.next_steps)) == [
        "sums: evaluate the candidate on all documents of the base"
    ]


def test_clusters_of_unknown_tasks_and_of_baselines_are_refused(tmp_path: Path) -> None:
    path = write_sealed(tmp_path / "base", Baseline.of(BASE, ACCEPTED.acceptance))
    with pytest.raises(UsageError, match="is a baseline, which has the clusters of its run"):
        read_sides(path, path, {"sums": "source"})
    folder = write(tmp_path / "run", {"sums": [sample("sums", 0)]})
    with pytest.raises(
        UsageError, match=r"--cluster mmlu: org/model.* has no such task, only sums"
    ):
        read_sides(folder, folder, {"mmlu": "source"})
    of_suite = {"sums": "source", "mmlu": "source"}
    for sides in (
        read_sides(folder, folder, {"sums": "source"}),
        read_sides(folder, folder, {}, of_suite),
    ):
        assert sides[0].tasks["sums"].items[0].cluster == "s0"
    assert read_sides(path, folder, {}, of_suite)[0].name == BASE.name


BASE = evaluation(
    answered(3, 4), task([item(n, log_probability=-float(n)) for n in (1, 2)], name="texts")
)
ACCEPTED = Baseline.of(
    BASE, Acceptance(by="a", date="2026-01-01", reason="r", command=["assay", "bench"])
)
BASELINES = dict(poisoned(ACCEPTED))
RESULTS = dict(poisoned(performance_result()))


def test_every_free_text_is_poisoned() -> None:
    assert len(BASELINES) > 20
    assert len(RESULTS) > 5


@pytest.mark.parametrize("path", BASELINES)
def test_text_of_a_baseline_is_harmless(path: str) -> None:
    base = BASELINES[path].evaluation()
    for pair in ((base, BASE), (BASE, base)):
        found = compare(*pair, Terms())
        assert_harmless_markdown(comparison_as_markdown(found))
        text = verdict_of(found).to_json()
        assert json.loads(escape_output(text)) == json.loads(text)


@pytest.mark.parametrize("field", ["key", "question", "target", "answer", "prompt_hash", "cluster"])
def test_text_of_a_sample_is_harmless(field: str) -> None:
    right, wrong = item(0, right=True), item(0, right=False)
    sides = [
        evaluation(task([replace(one, **{field: POISON})], name=f"t {POISON}"))  # type: ignore[arg-type]
        for one in (right, wrong)
    ]
    found = compare(sides[0], sides[1], Terms())
    assert_harmless_markdown(comparison_as_markdown(found))


@pytest.mark.parametrize("path", RESULTS)
def test_text_of_a_performance_result_is_harmless(path: str) -> None:
    stream = io.StringIO()
    open_text_console(stream).print(performance_table(RESULTS[path]))
    assert_harmless_text(stream.getvalue())


@pytest.mark.parametrize(
    ("margin", "low", "told"),
    [
        (
            0.0125,
            -0.02,
            "(90% interval -2.0 to +1.0): 100 items cannot exclude a drop of 1.25 points",
        ),
        # The number printed is the number judged.
        (
            0.03,
            -0.0298,
            "(90% interval -2.98 to +1.00): 100 items cannot exclude a drop of 3 points",
        ),
        (0.03, -0.03, "(90% interval -3.0 to +1.0): 100 items cannot exclude a drop of 3 points"),
    ],
)
def test_margin_is_not_rounded_and_bounds_are_on_its_right_side(
    margin: float, low: float, told: str
) -> None:
    measure = Measure(
        name="acc", kind="yes-no", base=0.5, candidate=0.5, difference=0.0, low=low, high=0.01, confidence=0.9,
        margin=margin, differences=Differences.of([0.0] * 100), num_items=100, p_worse=0.5, p_not_inferior=0.5,
    )  # fmt: skip
    assert told in measure_in_words(measure)
