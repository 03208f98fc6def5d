"""Options of the API: the command line that repeats a call, time limits, and options of generation."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from assay.api.checks import check_generate, check_train
from assay.api.options import command_line, input_options, seconds_of_timeout
from assay.errors import UsageError


def test_a_command_holds_what_differs_from_the_defaults() -> None:
    arguments = {
        "model": "micro:llama",
        "candidate": "sim/bfloat16",
        "reference": "cpu/float32",
        "candidate_option": {"threads": "1", "batch-size": "1"},
        "max_new_tokens": 4,
        "chat": True,
        "trust_remote_code": False,
        "level": "auto",
        "output": "mine",
    }
    assert command_line(check_generate, arguments) == (
        "assay", "check", "generate", "micro:llama", "--candidate", "sim/bfloat16",
        "--reference", "cpu/float32", "--candidate-option", "threads=1",
        "--candidate-option", "batch-size=1", "--max-new-tokens", "4", "--chat",
    )  # fmt: skip


RUNS = {"reference": "cpu/float32", "candidate": "cpu/bfloat16"}


@pytest.mark.parametrize(
    ("check", "options", "message"),
    [
        (check_generate, {"candidate": "cpu/bfloat16"}, "give either --reference RUN or --golden"),
        (
            check_generate,
            {"candidate": "cpu/bfloat16", "golden": "kept", "disk": "1G"},
            "--disk limits the golden of --reference",
        ),
        (
            check_generate,
            {"candidate": "cpu/bfloat16", "golden": "kept", "budget": "5m"},
            "--budget limits the golden of --reference",
        ),
        (check_generate, RUNS | {"budget": "5m", "level": "logits"}, "--budget is for --level"),
        (check_generate, RUNS | {"budget": "soon"}, "'soon' is not a time such as 90s"),
        (check_generate, RUNS | {"disk": "much"}, "'much' is not a size such as 500M"),
        (check_generate, RUNS | {"batch_size": 0}, "--batch-size 0: it must be"),
        (
            check_generate,
            RUNS | {"max_new_tokens": "no"},
            "--max-new-tokens no: it must be a whole number",
        ),
        (check_generate, RUNS | {"temperature": -1.0}, "--temperature -1.0: must be a number of"),
        (check_generate, RUNS | {"top_p": 1.5}, "--top-p 1.5: must be .* at least 0 and at most 1"),
        (check_generate, RUNS | {"top_k": 0}, "--top-k 0: must be a number of at least 1"),
        (check_generate, RUNS | {"candidate_setup": print, "candidate_model": print}, "either"),
        (check_train, RUNS | {"track": "wandb"}, "--track without --overfit"),
        (check_train, RUNS | {"mesh": "dp=2", "world": 4}, "--world 4: the mesh dp=2 has 2 ranks"),
    ],
)
def test_what_cannot_be_is_refused_before_a_folder_is_made(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    check: Callable[..., object],
    options: Mapping[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        check("micro:llama", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("variable", ["CI", "GITHUB_ACTIONS"])
def test_checks_have_two_hours_under_ci_unless_a_time_is_given(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    assert seconds_of_timeout(None) is None

    monkeypatch.setenv(variable, "true")
    assert seconds_of_timeout(None) == 2 * 3600
    assert seconds_of_timeout("30m") == 1800


def test_a_text_that_states_no_time_is_refused() -> None:
    with pytest.raises(UsageError, match="soon"):
        seconds_of_timeout("soon")


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
