"""Payloads of another shape than GitHub's are refused before planning."""

import json
from pathlib import Path
from typing import Any

import pytest

from assay.errors import UsageError
from assay_runners.workflow_run.events import read_event
from packages.runners.tests.event_payloads import pull_request

WRONG: list[dict[str, Any]] = [
    {"pull_request": "text"},
    {"pull_request": {"user": "text"}},
    {"pull_request": {"head": None}},
    {"pull_request": {"base": {"repo": [1]}}},
    {"pull_request": {"labels": [{"color": "ededed"}]}},
    {"sender": "text"},
    {"label": ["smoke:nvidia"]},
    {"inputs": [1]},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_payload_of_another_shape_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = tmp_path / "event.json"
    payload = pull_request("labeled", label="smoke:nvidia").payload | wrong
    path.write_text(json.dumps(payload))
    whole = tmp_path / "recorded_event.json"
    whole.write_text(json.dumps({"event_name": "pull_request", "event": payload}))
    variables = {"GITHUB_EVENT_PATH": str(path), "GITHUB_EVENT_NAME": "pull_request"}
    for file, environment in ((str(whole), {}), ("", variables)):
        with pytest.raises(UsageError, match=r"event\.json: ") as raised:
            read_event(file, environment)
        assert "\n" not in str(raised.value)
