"""Mistakes in setup function, options and mesh, found without weights."""

from pathlib import Path
from typing import Any

import pytest

from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.generate.processes.candidate_model import check_candidate
from assay.generate.processes.requests import CandidateRequest
from assay.runs import SilentProgress

SETUPS = """
def model_only(model): raise RuntimeError("called")
def with_default(model, factor=2): pass
def nothing(): pass
def two(model, other): pass
built_in = iter
"""


def check(**given: Any) -> None:
    run = parse_run("cpu/bfloat16")
    request = CandidateRequest(model="micro:llama", candidate=run, golden="", folder="", **given)
    check_candidate(request, SilentProgress())


@pytest.mark.parametrize("name", ["model_only", "with_default", "built_in"])
def test_function_that_takes_a_model_is_not_called(tmp_path: Path, name: str) -> None:
    (tmp_path / "setups.py").write_text(SETUPS)

    check(setup=f"{tmp_path / 'setups.py'}:{name}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", r"nothing\(\) cannot be called with the model alone"),
        ("two", r"two\(model, other\) cannot be called with the model alone.* 'other'"),
        ("absent", "has no function absent"),
    ],
)
def test_function_that_cannot_take_a_model_is_refused(
    tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "setups.py").write_text(SETUPS)

    with pytest.raises(UsageError, match=message):
        check(setup=f"{tmp_path / 'setups.py'}:{name}")


@pytest.mark.parametrize("text", ["def broken(", "import no_such_package_of_ours"])
def test_file_that_cannot_be_imported_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "setups.py").write_text(text)

    with pytest.raises(UsageError, match=r"raised (SyntaxError|ModuleNotFoundError)"):
        check(setup=f"{tmp_path / 'setups.py'}:broken")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"options": {"attention": "quantum"}}, "attention=quantum: .*not supported"),
        ({"options": {"experts": "fast"}}, "experts=fast: .*not supported"),
        ({"mesh": {"tp": 3}}, "4 query heads cannot be distributed evenly over 3"),
    ],
)
def test_setting_that_the_model_cannot_have_is_refused(given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check(**given)


def test_settings_that_the_model_has_are_taken() -> None:
    check(options={"attention": "sdpa", "compile": "1"}, mesh={"tp": 2})
