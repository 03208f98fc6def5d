"""Goldens that cannot judge what they are asked to: one clear error and exit code 2."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packages.core.tests.subsystem.commands import error_of

Run = Any  # RunAssay of conftest.py
BFLOAT16 = ("--candidate", "cpu/bfloat16")


def test_golden_that_is_not_there(assay: Run, tmp_path: Path) -> None:
    run = assay("check", "generate", "micro:llama", *BFLOAT16, "--golden", tmp_path / "absent")

    absent = tmp_path / "absent"
    assert (
        error_of(run)
        .rstrip()
        .endswith(
            f"{absent} does not exist. Capture it first: assay capture micro:llama --run RUN"
            f" --noise-for bfloat16 --output {absent}"
        )
    )


def test_golden_whose_capture_did_not_finish(assay: Run, golden: Path, tmp_path: Path) -> None:
    partial = Path(shutil.copytree(golden, tmp_path / "partial"))
    (partial / "golden.json").unlink()

    run = assay("check", "generate", "micro:llama", *BFLOAT16, "--golden", partial)

    message = error_of(run)
    assert "did not finish. To capture one: assay capture MODEL --run RUN" in message


def test_golden_that_is_damaged(assay: Run, golden: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(golden, tmp_path / "damaged"))
    (damaged / "golden.json").write_text('{"schema": 1}')

    run = assay("check", "generate", "micro:llama", *BFLOAT16, "--golden", damaged)

    assert "golden.json" in error_of(run)


def test_golden_whose_bits_flipped_on_the_way_is_no_fault_of_the_device(
    assay: Run, golden: Path, tmp_path: Path
) -> None:
    copied = Path(shutil.copytree(golden, tmp_path / "copied"))
    shard = max(copied.glob("bfloat16/shard-*"), key=lambda file: file.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)

    message = error_of(assay("check", "generate", "micro:llama", *BFLOAT16, "--golden", copied))

    assert f"{copied} changed since its capture" in message
    assert f"  bfloat16/{shard.name}: the values of " in message
    assert "use it unchecked (--no-verify), or capture it again: assay capture " in message
    assert message.rstrip().endswith(" --output NEW.golden")


def test_a_golden_without_a_file_names_the_command_that_captures_it(
    assay: Run, golden: Path, tmp_path: Path
) -> None:
    copied = Path(shutil.copytree(golden, tmp_path / "copied"))
    for shard in copied.glob("bfloat16/shard-*"):
        shard.unlink()
    message = error_of(assay("check", "generate", "micro:llama", *BFLOAT16, "--golden", copied))
    assert "the file is missing" in message
    assert "To capture it again: assay capture micro:llama --run cpu/float32" in message


def test_relative_prompts_of_a_golden_are_not_searched_here(
    assay: Run, golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = Path(shutil.copytree(golden, tmp_path / "copied"))
    manifest = json.loads((copied / "golden.json").read_text())
    manifest["inputs"]["prompts"] = "prompts.jsonl"
    (copied / "golden.json").write_text(json.dumps(manifest))
    monkeypatch.chdir(tmp_path)

    against = ("check", "generate", "micro:llama", "--golden", copied, "--no-verify")
    message = error_of(assay(*against, *BFLOAT16, "--max-new-tokens", "5"))

    assert "the golden has other inputs" in message
    assert "captured with max_new_tokens=8" in message


def test_golden_without_the_candidate_s_dtype_names_those_it_has(assay: Run, golden: Path) -> None:
    run = assay(
        "check", "generate", "micro:llama", "--candidate", "cpu/float16", "--golden", golden
    )

    message = error_of(run)
    assert (
        "is for candidates in bfloat16, float32, not in float16. To capture one: assay capture"
        in message
    )
    assert "--noise-for float16 " in message


def test_golden_of_another_model_names_both_hashes(assay: Run, golden: Path) -> None:
    run = assay("check", "generate", "micro:llama?trained=0", *BFLOAT16, "--golden", golden)

    message = error_of(run)
    expected = json.loads((golden / "golden.json").read_text())["model"]["weights_hash"]
    assert "golden is of another model" in message
    assert expected in message
    assert "weights" in message


def test_golden_of_other_prompts(check: Run, prompt_file: Callable[[str], Path]) -> None:
    other = prompt_file('{"prompt": "something else"}\n')

    message = error_of(check("--prompts", other))

    assert "prompts" in message
    assert "golden" in message


@pytest.mark.parametrize(
    "option",
    [("--max-new-tokens", "5"), ("--prompt-length", "8"), ("--batch-size", "2")],
)
def test_golden_of_other_settings(check: Run, option: tuple[str, str]) -> None:
    message = error_of(check(*option))

    assert "the golden has other inputs" in message
    assert option[0].strip("-").replace("-", "_") in message


def test_golden_of_greedy_decoding_is_not_one_of_sampling(check: Run) -> None:
    assert "captured with sampling={}" in error_of(check("--temperature", "0.7"))
