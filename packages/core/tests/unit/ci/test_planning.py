"""The jobs that labels, commits and dispatches start."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from assay.ci.configuration import Configuration
from assay.ci.planning import (
    Plan,
    describe_plan,
    plan_all,
    plan_label,
    plan_run,
    publish_jobs,
    write_outputs,
)
from assay.cli.application import app

CONFIGURATION = Configuration.model_validate(
    {
        "machines": {
            "box": {"runs-on": ["my-box", "gpu"], "run": "sim/bfloat16", "minutes": 90},
            "host": {
                "runs-on": ["ubuntu-24.04"], "run": "cpu/bfloat16", "start": "commit",
                "pip-index": "https://index.example",
            },
        },
        "load": [{"model": "m"}],
        "smoke": [{"coverage": "one"}],
    }
)  # fmt: skip


def plan_event(folder: Path, name: str, **payload: Any) -> Plan:
    file = folder / "event.json"
    file.write_text(json.dumps(payload), encoding="utf-8")
    return plan_run(CONFIGURATION, {"GITHUB_EVENT_PATH": str(file), "GITHUB_EVENT_NAME": name})


def summarize(plan: Plan) -> list[tuple[str, str]]:
    return [(job.target, job.tier) for job in plan.jobs]


@pytest.mark.parametrize("label", ["assay:box", "Assay:BOX", " assay:box "])
def test_a_label_starts_the_machine_that_it_names(label: str) -> None:
    (job,) = plan_label(CONFIGURATION, label).jobs
    assert (job.target, job.tier, job.runs_on, job.minutes) == ("box", "", ("my-box", "gpu"), 90)


def test_a_label_may_name_one_tier() -> None:
    assert summarize(plan_label(CONFIGURATION, "assay:box/smoke")) == [("box", "smoke")]


@pytest.mark.parametrize(
    ("label", "why"),
    [
        ("assay:bix", "unknown machine 'bix'; did you mean box?"),
        ("assay:", "unknown machine ''; known: box, host"),
        ("assay:box/smok", "unknown tier 'smok'; did you mean smoke?"),
        ("assay:box/", "unknown tier ''; known: check, smoke, expectations, bench"),
        ("assay:box/bench", "assay.toml has no entries for box/bench to run"),
    ],
)
def test_a_wrong_request_is_refused(label: str, why: str) -> None:
    plan = plan_label(CONFIGURATION, label)
    assert (plan.jobs, plan.refused, plan.nothing) == ((), why, "")


@pytest.mark.parametrize("label", ["bug", "assay", "assay-box", "area:box"])
def test_another_label_asks_for_nothing(label: str) -> None:
    plan = plan_label(CONFIGURATION, label)
    assert (plan.jobs, plan.refused) == ((), "")
    assert plan.nothing == "the labels that start a job begin with assay:"


@pytest.mark.parametrize(
    ("name", "payload", "started"),
    [
        ("pull_request", {"action": "labeled", "label": {"name": "assay:box"}}, [("box", "")]),
        ("pull_request", {"action": "labeled", "label": {"name": "bug"}}, []),
        ("pull_request", {"action": "opened"}, [("host", "")]),
        # The label of an earlier commit starts nothing for a later one.
        (
            "pull_request",
            {"action": "synchronize", "pull_request": {"labels": [{"name": "assay:box"}]}},
            [("host", "")],
        ),
        ("push", {"ref": "refs/heads/main"}, [("host", "")]),
        ("workflow_dispatch", {"inputs": {"label": "assay:box/check"}}, [("box", "check")]),
    ],
)
def test_an_event_starts_the_jobs_that_it_asks_for(
    tmp_path: Path, name: str, payload: dict[str, Any], started: list[tuple[str, str]]
) -> None:
    assert summarize(plan_event(tmp_path, name, **payload)) == started


def test_all_labels_and_a_commit_are_planned_together() -> None:
    configuration = CONFIGURATION.model_copy(update={"bench": ({"model": "m"},)})
    events = [(plan.event, summarize(plan)) for plan in plan_all(configuration)]
    assert events == [
        ("label assay:box", [("box", "")]),
        ("label assay:box/bench", [("box", "bench")]),  # not among its tiers
        ("label assay:host", [("host", "")]),
        ("label assay:host/bench", [("host", "bench")]),
        ("every commit", [("host", "")]),
    ]


def test_without_workflows_no_plan_speaks_of_labels() -> None:
    machines = {"box": {"run": "cpu/float32"}}
    configuration = Configuration.model_validate(
        {"machines": machines, "load": [{"model": "m"}], "bench": [{"model": "m"}]}
    )
    plans = [describe_plan(configuration, plan) for plan in plan_all(configuration)]
    assert plans == [
        "assay ci run box\n    check: assay check load m --run cpu/float32",
        "assay ci run box --tier bench\n    bench: assay bench run --model m --run cpu/float32",
    ]


@pytest.mark.parametrize("label", ["asay:box", "smoke:box", "bnch:box/check"])
def test_a_misspelled_prefix_is_refused_for_a_machine(label: str) -> None:
    plan = plan_label(CONFIGURATION, label)
    assert plan.refused.endswith(f"did you mean assay:{label.partition(':')[2]}?")


def test_a_plan_is_explained_with_its_commands() -> None:
    assert describe_plan(CONFIGURATION, plan_label(CONFIGURATION, "assay:box")).splitlines() == [
        "label assay:box",
        "  box: a job on a runner with my-box, gpu",
        "    check: assay check load m --run sim/bfloat16",
        "    smoke: assay smoke run --coverage one --device sim",
    ]
    refused = describe_plan(CONFIGURATION, plan_label(CONFIGURATION, "assay:bix\n::error::"))
    assert refused.splitlines()[0] == "label assay:bix\\n::error::"


def test_a_plan_says_that_the_labels_of_runners_are_not_checked(tmp_path: Path) -> None:
    (tmp_path / "assay.toml").write_text(
        "[machines.box]\nruns-on = ['my-box', 'gpu']\nrun = 'cpu/float32'\n[[load]]\nmodel = 'micro:llama'"
    )
    done = CliRunner().invoke(app, ["ci", "plan", "--root", str(tmp_path)])
    assert done.stderr == "assay: not checked: whether a runner on GitHub has my-box, gpu\n"


def test_nothing_is_written_outside_a_workflow_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_outputs({"a": "b"}, {})
    assert list(tmp_path.iterdir()) == []


def test_the_output_of_a_step_is_one_line_for_a_matrix(tmp_path: Path) -> None:
    file = tmp_path / "output"
    publish_jobs(plan_label(CONFIGURATION, "assay:host"), {"GITHUB_OUTPUT": str(file)})
    name, _, value = file.read_text(encoding="utf-8").partition("=")
    assert name == "jobs"
    assert json.loads(value) == [
        {
            "target": "host", "tier": "", "runs_on": ["ubuntu-24.04"], "minutes": 60,
            "pip_index": "https://index.example",
        }
    ]  # fmt: skip


def test_an_output_of_several_lines_is_refused(tmp_path: Path) -> None:
    # A second line would be another output.
    file = tmp_path / "output"
    with pytest.raises(ValueError, match="the output a has several lines"):
        write_outputs({"a": "1\nmachines=[]"}, {"GITHUB_OUTPUT": str(file)})
    assert not file.exists()
