"""What the files of `assay init` start in another repository, by GitHub's own parser and zizmor."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from assay.ci.configuration import read_configuration
from assay.ci.initializing import make_files, read_machine
from assay.ci.planning import plan_label, plan_run
from packages.runners.tests.event_payloads import BASE, HEAD, pull_request
from packages.runners.tests.fleet import ROOT
from packages.runners.tests.github_parser.workflows import EvaluatedCase, EventCase, evaluate

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CALLED = f"assay-project/assay/.github/workflows/repository.yml@{COMMIT}"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with one machine, after `assay init`."""
    root = tmp_path_factory.mktemp("other")
    (root / ".git").mkdir()
    (root / ".git/HEAD").write_text("ref: refs/heads/main\n", encoding="utf-8")
    files = make_files(root, [read_machine("box=self-hosted,my-box@sim/bfloat16")], "", COMMIT)
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def evaluate_event(
    repository: Path, action: str, label: str, event: str = "pull_request"
) -> EvaluatedCase:
    """Evaluate the event of a pull request that has `label`, with the jobs that assay plans for it."""
    given = {"label": label} if action == "labeled" else {}
    made = pull_request(action, labels=(label,), event=event, **given)  # type: ignore[arg-type]
    payload = repository / "event.json"
    payload.write_text(json.dumps(made.payload), encoding="utf-8")
    variables = {"GITHUB_EVENT_PATH": str(payload), "GITHUB_EVENT_NAME": event}
    plan = plan_run(read_configuration(repository), variables)
    outputs = {"jobs": json.dumps([asdict(job) for job in plan.jobs])}
    case = EventCase(
        name=action, event_name=made.name, event=made.payload,
        github={"sha": made.sha, "ref": made.ref, "repository": "other/trainer", "run_id": "1"},
        outputs={"assay.yml": {"assay / plan": outputs}},
    )  # fmt: skip
    text = (ROOT / ".github/workflows/repository.yml").read_text(encoding="utf-8")
    (found,) = evaluate(repository, [case], reusable={CALLED: text})
    assert found.errors == ()
    return found


def test_a_label_starts_its_machine_for_the_labeled_commit(repository: Path) -> None:
    plan, run = evaluate_event(repository, "labeled", "assay:box").jobs
    assert (plan.job, plan.checkouts, plan.permissions) == (
        "assay / plan", (BASE,), {"contents": "read"},
    )  # fmt: skip
    assert (run.job, run.checkouts, run.permissions) == (
        "assay / run", (HEAD,), {"contents": "read"},
    )  # fmt: skip
    assert run.runs_on.labels == ("self-hosted", "my-box")
    assert (run.matrix["target"], run.timeout_minutes) == ("box", 60)


@pytest.mark.parametrize(
    ("action", "label", "started"),
    [
        ("labeled", "bug", []),
        ("labeled", "assay:bax", []),
        ("opened", "assay:box", ["cpu"]),
        # The label was for the commit before.
        ("synchronize", "assay:box", ["cpu"]),
    ],
)
def test_other_events_start_only_what_every_commit_does(
    repository: Path, action: str, label: str, started: list[str]
) -> None:
    _, *runs = evaluate_event(repository, action, label).jobs
    assert [run.matrix["target"] for run in runs] == started


def test_a_push_withdraws_the_label_without_a_checkout(repository: Path) -> None:
    found = evaluate_event(repository, "synchronize", "assay:box", "pull_request_target")
    assert found.workflows == {"assay.yml": False, "assay-labels.yml": True}
    (job,) = found.jobs
    assert (job.checkouts, job.permissions) == ((), {"pull-requests": "write"})
    assert job.matrix == {"label": "assay:box"}


def test_each_key_of_a_job_is_one_that_the_workflow_reads(repository: Path) -> None:
    (job,) = plan_label(read_configuration(repository), "assay:box").jobs
    text = (ROOT / ".github/workflows/repository.yml").read_text(encoding="utf-8")
    assert {f"matrix.{key}" for key in asdict(job) if f"matrix.{key}" not in text} == set()


def test_the_written_workflows_have_no_finding_of_zizmor(repository: Path) -> None:
    program = Path(sys.executable).with_name("zizmor")
    command = [str(program), "--offline", "--persona=pedantic", str(repository / ".github")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "No findings" in done.stdout + done.stderr) == (0, True), done.stdout


def test_the_workflow_installs_the_release_of_this_commit() -> None:
    manifest = (ROOT / "packages/core/pyproject.toml").read_text(encoding="utf-8")
    workflow = YAML(typ="safe").load(ROOT / ".github/workflows/repository.yml")
    action = YAML(typ="safe").load(ROOT / ".github/actions/job/action.yml")
    default = workflow["on"]["workflow_call"]["inputs"]["version"]["default"]
    assert f'\nversion = "{default}"\n' in manifest
    assert action["inputs"]["version"]["default"] == default
