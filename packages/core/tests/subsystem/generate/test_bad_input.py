"""Every bad input gets one clear error and exit code 2, and no folder is spoiled."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from assay.models.transformers_calls import quiet_transformers
from packages.core.tests.subsystem.commands import error_of

Run = Any  # RunAssay of conftest.py
BFLOAT16 = ("--candidate", "cpu/bfloat16")
REFERENCE = ("--reference", "cpu/float32")


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "llama"
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with quiet_transformers():
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def model(saved_model: Path, tmp_path: Path) -> Path:
    """A Hugging Face folder that a test may damage."""
    return Path(shutil.copytree(saved_model, tmp_path / "model"))


# Models


@pytest.mark.long
def test_saved_folder_works_like_a_recipe(
    assay: Run, model: Path, prompt_file: Callable[[str], Path]
) -> None:
    prompts = prompt_file('{"ids": [5, 6, 7, 8]}\n{"ids": [9, 10]}\n')
    run = assay(
        "check", "generate", model, *REFERENCE, *BFLOAT16, "--prompts", prompts,
        "--max-new-tokens", "2",
    )  # fmt: skip

    assert (run.code, run.verdict["verdict"]) == (0, "PASS")
    assert run.verdict["model"]["architecture"] == "LlamaForCausalLM"


def test_model_folder_without_weights(assay: Run, model: Path) -> None:
    (model / "model.safetensors").unlink()

    message = error_of(assay("check", "generate", model, *REFERENCE, *BFLOAT16))

    assert str(model) in message
    assert "weights" in message or "safetensors" in message


def test_truncated_weights(assay: Run, model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    assert "model.safetensors" in error_of(assay("check", "generate", model, *REFERENCE, *BFLOAT16))


def test_weights_of_another_shape(assay: Run, model: Path) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.ones(17)
    save_file(tensors, file, metadata={"format": "pt"})

    message = error_of(assay("check", "generate", model, *REFERENCE, *BFLOAT16))

    assert "model.norm.weight" in message
    assert "[17]" in message
    assert "[16]" in message


def test_model_that_is_not_there(assay: Run) -> None:
    assert "micro:camel" in error_of(
        assay("check", "generate", "micro:camel", *REFERENCE, *BFLOAT16)
    ) or "camel" in error_of(assay("check", "generate", "micro:camel", *REFERENCE, *BFLOAT16))


# Devices


@pytest.mark.parametrize("run_name", ["cpu/float12", "cpu/int8", "sim:fp8/int8"])
@pytest.mark.parametrize("side", ["candidate", "reference"])
def test_dtype_that_the_device_lacks(assay: Run, run_name: str, side: str) -> None:
    runs = {"candidate": "cpu/bfloat16", "reference": "cpu/float32"} | {side: run_name}

    message = error_of(
        assay(
            "check", "generate", "micro:llama", "--reference", runs["reference"],
            "--candidate", runs["candidate"],
        )
    )  # fmt: skip

    assert run_name.rpartition("/")[2] in message


@pytest.mark.parametrize("side", ["candidate", "reference"])
def test_absent_device_says_what_is_missing_and_what_is_there(assay: Run, side: str) -> None:
    runs = {"candidate": "cpu/bfloat16", "reference": "cpu/float32"} | {side: "npu/bfloat16"}

    message = error_of(
        assay(
            "check", "generate", "micro:llama", "--reference", runs["reference"],
            "--candidate", runs["candidate"],
        )
    )  # fmt: skip

    assert "npu" in message
    assert "cpu" in message


def test_run_of_another_form(assay: Run) -> None:
    message = error_of(
        assay("check", "generate", "micro:llama", *REFERENCE, "--candidate", "bfloat16")
    )

    assert "bfloat16" in message


# Prompts


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "the file is empty"),
        ("\n\n", "the file is empty"),
        ('{"prompt": ""}\n', "the prompt is empty"),
        ("not json\n", "not JSON"),
        ('{"question": "x"}\n', "needs an object with one of the keys"),
        ('{"ids": [1, 300]}\n', "outside the vocabulary of 300"),
        ('{"ids": [1, -1]}\n', "outside the vocabulary"),
        ('{"ids": ' + str([7] * 62) + "}\n", "context of 64"),
    ],
    ids=["empty file", "blank lines", "empty prompt", "not JSON", "no prompt", "id too large",
         "negative id", "over the context"],
)  # fmt: skip
def test_prompts_that_the_model_cannot_take(
    assay: Run, model: Path, prompt_file: Callable[[str], Path], text: str, why: str
) -> None:
    run = assay(
        "check", "generate", model, *REFERENCE, *BFLOAT16, "--prompts", prompt_file(text),
        "--max-new-tokens", "4",
    )  # fmt: skip

    message = error_of(run)
    assert why in message
    assert "p.jsonl" in message


def test_prompts_file_that_is_not_there(assay: Run, model: Path, tmp_path: Path) -> None:
    run = assay(
        "check", "generate", model, *REFERENCE, *BFLOAT16, "--prompts", tmp_path / "absent.jsonl"
    )

    assert "absent.jsonl" in error_of(run)


# Setup functions


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("raises", "raised RuntimeError: no such kernel"),
        ("exits", "raised SystemExit"),
        ("returns_text", "returned str; it must return a module"),
        ("absent", "unknown function 'absent'"),
        ("not_callable", "not_callable is not a function or class of"),
    ],
)
def test_setup_function_that_does_not_work(check: Run, setups: Path, name: str, why: str) -> None:
    message = error_of(check("--candidate-setup", f"{setups}:{name}"))

    assert why in message
    assert "setups.py" in message


@pytest.mark.parametrize(
    ("reference", "why"),
    [("absent.py:plant", "there is no file"), ("absent.py", "not of the form FILE.py:NAME")],
)
def test_setup_file_that_is_not_there(check: Run, reference: str, why: str) -> None:
    assert why in error_of(check("--candidate-setup", reference))


def test_setup_function_that_is_not_there_is_refused_before_the_reference_runs(
    assay: Run, model: Path, setups: Path
) -> None:
    run = assay(
        "check", "generate", model, *REFERENCE, *BFLOAT16, "--candidate-setup", f"{setups}:absent"
    )

    assert "unknown function 'absent'" in error_of(run)
    assert not (run.folder / "golden").exists()


def test_setup_file_that_cannot_be_imported(check: Run, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_package_of_ours\n")

    message = error_of(check("--candidate-setup", f"{tmp_path / 'broken.py'}:plant"))

    assert "ModuleNotFoundError" in message


# Options


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--candidate-option", "threads"), "not of the form NAME=VALUE"),
        (("--candidate-option", "speed=9"), "unknown candidate option 'speed'"),
        (("--candidate-option", "threads=0"), "must be a whole number from 1 to"),
        (("--candidate-option", "attention=quantum"), "quantum"),
        (("--temperature", "inf"), "--temperature inf: must be a number of at least 0"),
        (("--prompt-length", "9" * 5000), "must be a whole number from 0 to 1,000,000"),
        (("--mesh", f"tp={'9' * 5000}"), "must be a whole number from 1 to 1,000,000"),
        (("--batch-size", "99999999"), "it must be at most 1000000"),
        (("--seed", "99999999999999999999"), "it must be at most 9223372036854775807"),
        (("--limits", "strict"), "no limits called 'strict'"),
        (("--limits", "absent.toml"), "absent.toml: cannot be read: No such file"),
    ],
)
def test_option_that_cannot_be(check: Run, options: tuple[str, ...], why: str) -> None:
    assert why in error_of(check(*options))


def test_limits_are_refused_before_anything_runs(check: Run) -> None:
    run = check("--limits", "strict")

    assert not (run.folder / "candidate").exists()


@pytest.mark.parametrize("sides", ["neither", "both"])
def test_reference_and_golden_are_one_or_the_other(assay: Run, golden: Path, sides: str) -> None:
    given = () if sides == "neither" else (*REFERENCE, "--golden", golden)

    message = error_of(assay("check", "generate", "micro:llama", *BFLOAT16, *given))

    assert "--reference" in message
    assert "--golden" in message


# Folders


def test_output_folder_that_holds_something(check: Run, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("x")

    message = error_of(check(output=folder))

    assert "is not empty" in message
    assert "thesis.txt" in message
    assert sorted(path.name for path in folder.iterdir()) == ["thesis.txt"]


@pytest.mark.long
def test_second_run_into_one_folder(check: Run, clean: Run) -> None:
    before = (clean.folder / "verdict.json").read_bytes()

    message = error_of(check(output=clean.folder))

    assert "another run" in message
    assert (clean.folder / "verdict.json").read_bytes() == before


def test_output_folder_that_cannot_be_written(check: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")

    assert "cannot write" in error_of(check(output=tmp_path / "file" / "run"))
    assert "cannot write" in error_of(check(output=Path("/proc/assay-run")))
