"""`assay bench` as users type it."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from assay_bench.results import read_result

# The evaluation itself takes half a minute on an idle machine.
pytestmark = pytest.mark.timeout(600)

TASK = """
task: counting
dataset_path: json
dataset_kwargs: {data_files: {test: counting.jsonl}}
output_type: multiple_choice
test_split: test
doc_to_text: context
doc_to_choice: choices
doc_to_target: label
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def assay(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "assay.cli", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def judged(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = assay(*arguments, "--json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of the trained model in two precisions, and of one with random weights."""
    folder = tmp_path_factory.mktemp("bench")
    for name, model, run in (
        ("trained", "micro:llama", "cpu/float32"),
        ("bfloat16", "micro:llama", "cpu/bfloat16"),
        ("random", "micro:llama?trained=0", "cpu/float32"),
    ):
        code, verdict = judged(
            "run", "--model", model, "--run", run, "--output", str(folder / name)
        )
        expected = (1, "FAIL") if name == "random" else (0, "PASS")
        assert (code, verdict["verdict"]) == expected
    return folder


def test_a_result_has_a_score_with_its_standard_error(runs: Path) -> None:
    result = read_result(runs / "trained")
    num = len(result.right)
    assert result.metric == "acc"
    assert result.chance == 0.25
    assert result.score == pytest.approx(sum(result.right) / num)
    # lm-eval divides by n - 1.
    variance = result.score * (1 - result.score) / (num - 1)
    assert result.standard_error == pytest.approx(variance**0.5)
    assert result.score - result.chance > 5 * result.standard_error


def test_random_weights_are_significantly_worse(runs: Path, tmp_path: Path) -> None:
    code, verdict = judged(
        "compare", str(runs / "trained"), str(runs / "random"), "--output", str(tmp_path / "run")
    )
    assert (code, verdict["verdict"]) == (1, "FAIL")
    assert verdict["compared"] == len(read_result(runs / "trained").right)


@pytest.mark.parametrize("other", ["trained", "bfloat16"])
def test_the_same_model_is_not_worse(runs: Path, tmp_path: Path, other: str) -> None:
    code, verdict = judged(
        "compare", str(runs / "trained"), str(runs / other), "--output", str(tmp_path / "run")
    )
    assert (code, verdict["verdict"]) == (0, "PASS")


def test_a_task_of_ones_own_is_another_question(runs: Path, tmp_path: Path) -> None:
    documents = [{"context": "for i in rang", "choices": ["e", "q", "Z", "7"], "label": 0}] * 8
    (tmp_path / "counting.jsonl").write_text("\n".join(map(json.dumps, documents)))
    (tmp_path / "counting.yaml").write_text(TASK)
    output = tmp_path / "counting"
    code, verdict = judged(
        "run", "--task", str(tmp_path / "counting.yaml"), "--output", str(output)
    )
    assert (code, verdict["candidate"]["acc"], verdict["compared"]) == (0, 1.0, 8)
    code, verdict = judged(
        "compare", str(runs / "trained"), str(output), "--output", str(tmp_path / "compare")
    )
    assert (code, verdict["verdict"]) == (3, "NOT_COMPARED")


@pytest.mark.parametrize(("num_documents", "code"), [(0, 3), (1, 1)])
def test_a_task_of_no_or_one_document_has_a_verdict(
    tmp_path: Path, num_documents: int, code: int
) -> None:
    one = {"context": "for i in rang", "choices": ["q", "e"], "label": 0}
    (tmp_path / "counting.jsonl").write_text(json.dumps(one) * num_documents)
    (tmp_path / "counting.yaml").write_text(TASK)
    found, verdict = judged(
        "run", "--task", str(tmp_path / "counting.yaml"), "--output", str(tmp_path / "run")
    )
    assert (found, verdict["compared"]) == (code, num_documents)
    # What has no value is not written as one; the file is read again.
    assert "standard_error" not in verdict["candidate"]
    assert math.isnan(read_result(tmp_path / "run").standard_error)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--task", "hellaswag"], "task hellaswag: there is no such file"),
        (["run", "--model", "micro:lama"], "no recipe 'lama'"),
        (["compare", "absent", "absent"], "absent is no result of `assay bench run`"),
    ],
)
def test_what_cannot_be_done_exits_with_2_and_one_message(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = assay(*arguments, "--output", str(tmp_path / "run"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(f"assay: {message}")
