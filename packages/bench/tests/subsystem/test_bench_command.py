"""The command `assay bench`."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from packages.core.tests.subsystem.commands import run_command

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

PAGE = (Path(__file__).parents[4] / "docs/benchmark.md").read_text(encoding="utf-8")
(TASK,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
(DOCUMENTS,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)

# 2 % of the units of one layer are 1.5 times as large.
DAMAGE = """
import torch

def scale(model):
    weight = model.get_submodule("model.layers.1.mlp.down_proj").weight
    with torch.no_grad():
        weight[:, : max(1, weight.shape[1] // 50)] *= 1.5
"""


def assay(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("bench", *arguments)


def judged(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = assay(*arguments, "--json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two quick tasks: a shipped one of text, and a file with options in the suite's folder."""
    folder = tmp_path_factory.mktemp("suite")
    documents = [
        {"context": f"for i in range({n}):\n    pr", "choices": ["int", "q~@"], "label": 0}
        for n in range(200)
    ]
    (folder / "counting.jsonl").write_text("\n".join(map(json.dumps, documents)))
    (folder / "counting.yaml").write_text(TASK)
    (folder / "quick.toml").write_text(
        'tasks = ["library-text", "counting.yaml"]\n'
        "terms = {accuracy = 0.05, log_probability = 0.0001}\n"
    )
    (folder / "damage.py").write_text(DAMAGE)
    return folder


@pytest.fixture(scope="module")
def runs(suite: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of a trained model and of a damaged copy."""
    folder = tmp_path_factory.mktemp("runs")
    for name, setup in (
        ("trained", []),
        ("damaged", ["--candidate-setup", f"{suite}/damage.py:scale"]),
    ):
        code, verdict = judged(
            *("run", "--suite", str(suite / "quick.toml"), "--limit", "60", *setup),
            *("--output", str(folder / name)),
        )
        assert (code, verdict["verdict"], verdict["compared"]) == (0, "PASS", 120), verdict
        assert verdict["headline"] == "Better than a guess: library-text, counting."
    return folder


def test_task_of_the_documentation_runs_without_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "counting.yaml").write_text(TASK)
    (tmp_path / "counting.jsonl").write_text(DOCUMENTS)
    code, verdict = judged(
        *("run", "--task", str(tmp_path / "counting.yaml"), "--output", str(tmp_path / "run"))
    )
    assert (code, verdict["verdict"], verdict["compared"]) == (3, "NOT_COMPARED", 2), verdict
    assert verdict["levels"]["counting"]["reason"].startswith("underpowered: 2 items neither")


def test_damaged_layer_is_not_a_pass_by_the_suite_of_the_runs(runs: Path, tmp_path: Path) -> None:
    code, verdict = judged(
        *("compare", str(runs / "trained"), str(runs / "damaged")),
        *("--output", str(tmp_path / "run")),
    )
    # Both runs recorded their suite.
    measures = [one for level in verdict["levels"].values() for one in level["measures"]]
    assert {one["margin"] for one in measures} == {0.05, 0.0001}
    assert {one["margin_source"] for one in measures} == {"suite quick.toml"}
    assert "margins: suite quick.toml (of the base)" in verdict["notes"]
    assert (tmp_path / "run" / "measurements.jsonl").read_text()
    # So few items can be too few for a FAIL.
    assert (code, verdict["verdict"]) in {(1, "FAIL"), (3, "NOT_COMPARED")}, verdict
    assert (tmp_path / "run" / "comparison.md").read_text().startswith(("### FAIL", "### NOT_C"))


def test_interrupted_run_continues_and_accepted_run_is_a_baseline(
    runs: Path, suite: Path, tmp_path: Path
) -> None:
    done = runs / "trained" / "tasks" / "library-text" / "done.json"
    written = done.stat().st_mtime_ns
    baseline = tmp_path / "llama.json"
    accepted = assay("accept", str(runs / "trained"), str(baseline), "--approved-by", "Ada")
    assert accepted.returncode == 0, accepted.stderr
    assert "accepted: 2 tasks\n" in accepted.stderr

    again = assay("accept", str(runs / "trained"), str(baseline), "--reason", "not approved yet")
    assert "replaced: 2 tasks, not approved; to approve: --approved-by NAME\n" in again.stderr

    (runs / "trained" / "tasks" / "counting" / "done.json").unlink()
    code, _ = judged(
        *("run", "--suite", str(suite / "quick.toml"), "--limit", "60"),
        *("--output", str(runs / "trained")),
    )
    assert code == 0
    assert done.stat().st_mtime_ns == written
    assert len([*done.parents[1].glob("counting/results_*.json")]) == 1

    for options, note in (
        ([], "margins: suite quick.toml (of the base)"),
        (
            ["--suite", "retrained", "--margin", "0.1"],
            "margins: suite retrained (--suite), not suite quick.toml of the base; --margin",
        ),
    ):
        code, verdict = judged(
            *("compare", str(baseline), str(runs / "trained"), *options),
            *("--output", str(tmp_path / f"run{len(options)}")),
        )
        assert (code, verdict["verdict"]) == (0, "PASS"), verdict
        assert [one for one in verdict["notes"] if one.startswith("margins")] == [note]


def test_run_of_lm_evals_command_line_is_read_and_different_few_shot_refused(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # lm-eval requests every name from the hub.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    for name, fewshot in (("zero", 0), ("two", 2)):
        (suite / f"{name}.toml").write_text(f'tasks = ["counting.yaml"]\nfewshot = {fewshot}\n')
        # `dummy` answers at random from a seed.
        done = assay(
            *("run", "--suite", str(suite / f"{name}.toml"), "--model-backend", "dummy"),
            *("--output", name, "--json"),
        )
        assert done.returncode in (0, 1), done.stderr
    code, verdict = judged(
        *("compare", str(tmp_path / "zero" / "lm-eval"), str(tmp_path / "two" / "lm-eval")),
        *("--output", str(tmp_path / "run")),
    )
    assert (code, verdict["verdict"]) == (3, "NOT_COMPARED")
    assert "fewshot is 2, base 0" in verdict["levels"]["counting"]["reason"]


def test_random_weights_do_not_pass_a_task_of_text_alone(tmp_path: Path) -> None:
    code, verdict = judged(
        *("run", "--model", "micro:llama?trained=0", "--task", "library-text", "--limit", "20"),
        *("--output", str(tmp_path / "run")),
    )
    assert (code, verdict["verdict"]) in {(1, "FAIL"), (3, "NOT_COMPARED")}, verdict


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--task", "absent.yaml"], "absent.yaml: cannot be read: No such file"),
        (["run", "--model", "micro:lama"], "unknown recipe 'lama'"),
        (["run", "--model", "micro:bert"], "micro:bert does not predict next tokens"),
        (
            ["run", "--model-backend", "hf", "--model-args", "pretrained=./a"],
            "model './a': no such",
        ),
        (["run", "--batch-size", "0"], "--batch-size 0: expected a number above 0, or auto"),
        (["run", "--suite", "absent"], "suite absent does not exist; shipped suites:"),
        (["compare", "absent", "absent"], "absent: no such file or folder"),
        (
            # The model does not exist either: the names come first.
            ["run", "--task", "cloze", "--task", "nosuchtask", "--model", "absent/model"],
            "task nosuchtask: lm-eval does not know this name; ",
        ),
        (["compare", "a", "b", "--margin", "3"], "--margin: accuracy: it must be less than 1"),
        (
            ["compare", "a", "b", "--margin-nats", "-1"],
            "--margin-nats: log_probability: it must be",
        ),
        (["compare", "a", "b", "--cluster", "a"], "--cluster a: expected TASK=FIELD"),
        (["compare", "a", "b", "--metric", "acc"], "--metric acc: expected TASK=METRIC"),
    ],
)
def test_usage_error_exits_with_2_and_one_message(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = assay(*arguments, "--output", str(tmp_path / "run"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(f"assay: {message}"), done.stderr
    assert "evaluation" not in done.stderr or "nosuchtask" in message  # without a process
    assert not (tmp_path / "run").exists()  # can be used again
