"""GitHub's own parser on the example of another repository that checks its models."""

import pytest
from ruamel.yaml import YAML

from packages.runners.tests.event_payloads import HEAD, labeled, pull_request
from packages.runners.tests.fleet import GITHUB, ROOT
from packages.runners.tests.github_parser.workflows import EvaluatedCase, EventCase, evaluate

EXAMPLE = ROOT / "examples/other_repository"
FILE = EXAMPLE / ".github/workflows/assay.yml"
CALLED = YAML(typ="safe").load(FILE.read_text(encoding="utf-8"))["jobs"]["llama"]["uses"]


def started(label: str, action: str = "labeled") -> EvaluatedCase:
    event = labeled(label) if action == "labeled" else pull_request(action, labels=(label,))
    github = {"sha": event.sha, "ref": event.ref, "repository": "other/models", "run_id": "1"}
    case = EventCase(name=label, event_name=event.name, event=event.payload, github=github)
    text = (ROOT / ".github/workflows/check.yml").read_text(encoding="utf-8")
    (found,) = evaluate(EXAMPLE, [case], reusable={CALLED: text})
    return found


def test_a_label_starts_one_job_for_the_labeled_commit() -> None:
    (job,) = started("assay").jobs
    assert job.job == "llama / check"
    assert job.runs_on.labels == ("my-gpu",)
    assert job.checkouts == (HEAD,)
    assert job.permissions == {"contents": "read"}
    assert job.timeout_minutes == 60
    assert job.inputs["golden"] == "goldens/llama"
    assert f"{GITHUB.repository}/.github/workflows/check.yml@{'0' * 40}" == CALLED


@pytest.mark.parametrize(("label", "action"), [("bug", "labeled"), ("assay", "synchronize")])
def test_no_other_event_starts_a_job(label: str, action: str) -> None:
    assert started(label, action).jobs == ()


def test_the_example_has_ten_lines() -> None:
    text = FILE.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(lines) == 10
