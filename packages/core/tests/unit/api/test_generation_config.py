"""Options of generation as the command line takes them, from flags and from a file."""

import json
from pathlib import Path
from typing import Any

import pytest

from assay.api.inputs import input_options
from assay.errors import UsageError

# What files of the hub have beside what chooses tokens.
HARMLESS = {
    "_from_model_config": True,
    "bos_token_id": 1,
    "cache_implementation": "hybrid",
    "eos_token_id": [2, 3],
    "max_length": 4096,
    "max_new_tokens": 2048,
    "num_beams": 1,
    "pad_token_id": 0,
    "top_h": None,
    "transformers_version": "5.0.0",
}


def sampling_options(
    temperature: float | None, top_p: float | None, top_k: int | None, file: str | None
) -> dict[str, Any]:
    options = input_options(
        prompts=None, prompt_length=None, batch_size=None, max_new_tokens=None, chat=False,
        temperature=temperature, top_p=top_p, top_k=top_k, generation_config=file, seed=None,
    )  # fmt: skip
    return options.sampling


def write(folder: Path, config: object) -> str:
    path = folder / "generation_config.json"
    path.write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({}, {}),
        (HARMLESS, {}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1, "do_sample": False}),
        ({"suppress_tokens": [7]}, {"suppress_tokens": [7], "do_sample": False}),
        ({"do_sample": True}, {"do_sample": True}),
        ({"temperature": 0.6, "top_p": 1}, {"temperature": 0.6, "top_p": 1, "do_sample": True}),
        ({"do_sample": False, "temperature": 0.6}, {}),
        ({"do_sample": True, "temperature": 0, "top_k": 5}, {}),
        (
            HARMLESS | {"do_sample": True, "temperature": 0.6, "repetition_penalty": 1.05},
            {"do_sample": True, "temperature": 0.6, "repetition_penalty": 1.05},
        ),
    ],
)
def test_a_file_samples_only_if_it_says_so(
    tmp_path: Path, config: dict[str, Any], options: dict[str, Any]
) -> None:
    assert sampling_options(None, None, None, write(tmp_path, config)) == options


def test_nothing_given_is_greedy() -> None:
    assert sampling_options(None, None, None, None) == {}


@pytest.mark.parametrize("top_p", [None, 0.9])
def test_a_temperature_of_zero_is_greedy(top_p: float | None) -> None:
    assert sampling_options(0.0, top_p, None, None) == {}


def test_a_flag_asks_for_sampling_and_goes_before_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, {"do_sample": False, "top_k": 5, "repetition_penalty": 1.1})
    assert sampling_options(0.7, None, 9, file) == {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 9,
        "repetition_penalty": 1.1,
    }


def test_a_temperature_of_zero_goes_before_a_file_that_samples(tmp_path: Path) -> None:
    file = write(tmp_path, {"do_sample": True, "temperature": 0.6, "repetition_penalty": 1.1})
    assert sampling_options(0.0, None, None, file) == {
        "repetition_penalty": 1.1,
        "do_sample": False,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 4),
        ("num_return_sequences", 2),
        ("use_cache", False),
        ("cache_implementation", "static"),
        ("penalty_alpha", 0.6),
        ("tempature", 0.7),
        ("temperature", "hot"),
        ("temperature", -1.0),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("top_k", True),
        ("do_sample", "yes"),
        ("suppress_tokens", 7),
        ("repetition_penalty", -1.1),
    ],
)
def test_what_would_vanish_silently_is_refused_by_name(
    tmp_path: Path, name: str, value: object
) -> None:
    file = write(tmp_path, {"repetition_penalty": 1.1} | {name: value})
    with pytest.raises(UsageError) as raised:
        sampling_options(None, None, None, file)
    assert str(raised.value).startswith(
        f"generation config {file}: {name}={json.dumps(value)} cannot be used; assay generates one"
        " sequence, greedily or by sampling, with: do_sample, temperature, "
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [("[1]", "not a JSON object"), ("{", "not JSON"), ("[" * 100_000, "not JSON: nested deeper")],
)
def test_a_file_that_is_no_configuration_is_refused(
    tmp_path: Path, text: str, problem: str
) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=f"{file}: {problem}"):
        sampling_options(None, None, None, str(file))
