"""A candidate that fails does not cost the reference."""

from pathlib import Path

import pytest

from assay.devices.run_string import Run
from assay.errors import UsageError
from assay.generate.check import check_generate
from assay.generate.processes.remote_functions import CANDIDATE
from assay.generate.processes.requests import GenerateCheck
from assay.runs import SilentProgress


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def fail_in_candidate(function: object, *args: object, **kwargs: object) -> None:
    if function is CANDIDATE:
        raise UsageError("plant.py:setup raised TypeError")


@pytest.mark.parametrize("is_given", [False, True])
def test_failing_candidate_names_the_reference_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_given: bool
) -> None:
    monkeypatch.setattr("assay.generate.check.call", fail_in_candidate)
    check = GenerateCheck(
        model="micro:llama",
        reference=None if is_given else Run("cpu", "float32"),
        golden=tmp_path if is_given else None,
        candidate=Run("cpu", "bfloat16"),
        verify_golden=False,
    )
    progress = Notes()

    with pytest.raises(UsageError, match="setup raised TypeError"):
        check_generate(check, tmp_path, progress)

    kept = f"the reference is kept: --golden {tmp_path} reads it again"
    assert progress.notes == ([] if is_given else [kept])
