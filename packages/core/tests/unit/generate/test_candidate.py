"""Mistakes that are found without weights, and what a candidate reports about its weights."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.generate.candidate import _different_weights, _untied, check_candidate
from assay.generate.spec import GenerateCheck
from assay.models import weight_hashes
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
    check = GenerateCheck(model="micro:llama", candidate=run, **given)
    try:
        check_candidate(check, SilentProgress())
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
        ("absent", "unknown function 'absent'"),
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


def section_of(model: nn.Module) -> Any:
    """The section of a golden with the present weights of `model`."""
    hashes = weight_hashes(model)
    return SimpleNamespace(weights=lambda: hashes)


def head_on(embedding: str) -> nn.ModuleDict:
    """A model whose head is tied to its embedding of this name."""
    model = nn.ModuleDict({embedding: nn.Embedding(7, 4), "lm_head": nn.Linear(4, 7, bias=False)})
    model["lm_head"].weight = model[embedding].weight
    return model


@pytest.mark.parametrize("embedding", ["embed_tokens", "wte"])
def test_head_that_lost_its_tie_is_listed(embedding: str) -> None:
    model = head_on(embedding)
    section = section_of(model)

    assert _untied(section, model) == []
    model["lm_head"].weight = nn.Linear(4, 7, bias=False).weight
    assert _untied(section, model) == ["lm_head.weight"]


def test_head_that_the_reference_does_not_tie_is_not_listed() -> None:
    model = nn.ModuleDict({"wte": nn.Embedding(7, 4), "lm_head": nn.Linear(4, 7, bias=False)})

    assert _untied(section_of(model), model) == []


def test_weights_of_a_wrapped_model_have_the_names_of_the_model() -> None:
    model = head_on("wte")

    assert _different_weights(section_of(model), nn.ModuleDict({"module": model})) == []
    changed = nn.ModuleDict({"module": head_on("wte")})
    assert "wte.weight" in _different_weights(section_of(model), changed)
