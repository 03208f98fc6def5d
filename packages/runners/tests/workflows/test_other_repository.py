"""GitHub's own parser on the example of another repository that checks its models."""

from pathlib import Path

import pytest

from packages.runners.tests.event_payloads import HEAD, labeled, pull_request
from packages.runners.tests.github_parser.workflows import EvaluatedCase, EventCase, evaluate

ROOT = Path(__file__).resolve().parents[4]
EXAMPLE = ROOT / "examples/other_repository"
CALLED = f"assay-project/assay/.github/workflows/check.yml@{'0' * 40}"


def started(label: str, action: str = "labeled") -> EvaluatedCase:
    event = labeled(label) if action == "labeled" else pull_request(action, labels=(label,))
    github = {"sha": event.sha, "ref": event.ref, "repository": "other/models", "run_id": "1"}
    case = EventCase(name=label, event_name=event.name, event=event.payload, github=github)
    text = (ROOT / ".github/workflows/check.yml").read_text(encoding="utf-8")
    (found,) = evaluate(EXAMPLE, [case], reusable={CALLED: text}, folder=ROOT / ".nox/evaluating")
    return found


def test_a_label_starts_one_job_for_the_labeled_commit() -> None:
    (job,) = started("assay").jobs
    assert job.job == "llama / check"
    assert job.runs_on.labels == ("my-gpu",)
    assert job.checkouts == (HEAD,)
    assert job.permissions == {"contents": "read"}
    assert job.timeout_minutes == 60
    assert job.inputs["golden"] == "goldens/llama"


@pytest.mark.parametrize(("label", "action"), [("bug", "labeled"), ("assay", "synchronize")])
def test_no_other_event_starts_a_job(label: str, action: str) -> None:
    assert started(label, action).jobs == ()


def test_the_example_has_ten_lines() -> None:
    text = (EXAMPLE / ".github/workflows/assay.yml").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(lines) == 10
