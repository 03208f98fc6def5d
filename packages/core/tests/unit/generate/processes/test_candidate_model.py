"""Mistakes in setup function, options and mesh, found without weights."""

import re
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


def refusal(**given: Any) -> str:
    """The message of the refusal; "" for none."""
    run = parse_run("cpu/bfloat16")
    request = CandidateRequest(model="micro:llama", candidate=run, golden="", folder="", **given)
    try:
        check_candidate(request, SilentProgress())
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["model_only", "with_default", "built_in"])
def test_function_that_takes_a_model_is_not_called(tmp_path: Path, name: str) -> None:
    (tmp_path / "setups.py").write_text(SETUPS)

    assert refusal(setup=f"{tmp_path / 'setups.py'}:{name}") == ""


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

    assert re.search(message, refusal(setup=f"{tmp_path / 'setups.py'}:{name}"))


@pytest.mark.parametrize("text", ["def broken(", "import no_such_package_of_ours"])
def test_file_that_cannot_be_imported_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "setups.py").write_text(text)

    message = refusal(setup=f"{tmp_path / 'setups.py'}:broken")
    assert re.search("raised (SyntaxError|ModuleNotFoundError)", message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"options": {"attention": "quantum"}}, "attention=quantum: .*not supported"),
        ({"options": {"experts": "fast"}}, "experts=fast: .*not supported"),
        ({"mesh": {"tp": 3}}, "4 query heads cannot be distributed evenly over 3"),
    ],
)
def test_setting_that_the_model_cannot_have_is_refused(given: Any, message: str) -> None:
    assert re.search(message, refusal(**given))


def test_settings_that_the_model_has_are_taken() -> None:
    assert refusal(options={"attention": "sdpa", "compile": "1"}, mesh={"tp": 2}) == ""
