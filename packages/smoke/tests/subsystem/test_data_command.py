"""`assay smoke data` from the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[4] / "examples/data_checks"
PLANTS = Path(__file__).parents[1] / "data_plants"
COMMAND = """
import typer
from assay.cli.ending import exit_on_error
from assay_smoke.commands import data
with exit_on_error():
    typer.run(data)
"""


def smoke_data(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", COMMAND, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def own(option: str, file: str, name: str) -> list[str]:
    return [f"--{option}", f"{PLANTS / file}:{name}"]


@pytest.mark.long
def test_right_code_passes_and_a_wrong_collator_fails_by_name(tmp_path: Path) -> None:
    right = [
        *own("render", "renders.py", "keeping_the_end"),
        *["--truncation", "keep-end"],
        *own("collator", "collators.py", "pad_id_masked"),
        *own("packing", "collators.py", "right_packed"),
        *own("sampler", "samplers.py", "right"),
        *own("batch-sampler", "samplers.py", "right_budget"),
        *own("accumulation", "steps.py", "right"),
        *own("loader", "loaders.py", "right"),
        *own("dataset", "loaders.py", "right_items"),
    ]
    done = smoke_data(*right, "--json", "--output", str(tmp_path / "run"))
    assert done.returncode == 1, done.stderr
    verdict = json.loads(done.stdout)
    assert json.loads((tmp_path / "run/verdict.json").read_text()) == verdict
    levels = verdict["levels"]
    assert {name: level["verdict"] for name, level in levels.items()} == {
        "chat": "PASS", "labels": "PASS", "collator": "FAIL", "packing": "PASS",
        "sampler": "PASS", "batch-sampler": "PASS", "accumulation": "PASS", "workers": "PASS",
    }  # fmt: skip
    assert all(level["compared"] for level in levels.values())
    ((finding,),) = [subject["findings"] for subject in levels["collator"]["subjects"]]
    assert finding["name"] == "a token has the label that its sample has"
    assert finding["example"] == [
        "samples of 2 tokens, the tokenizer pads with EOS on the right; row 0",
        "     0  'a' (97)                      no label",
        ">    1  '<|eos|>' (257)               no label",
    ]
    assert "; broken in 12 of 24 cases" in done.stderr
    page = (tmp_path / "run/report.html").read_text()
    assert "<b>a token has the label that its sample has</b>: broken in 12 of 24 cases" in page
    assert "&gt;    1  &#39;&lt;|eos|&gt;&#39; (257)               no label" in page
    # The file is imported in a process of its own, whose log is beside the verdict.
    assert (tmp_path / "run/data.log").is_file()


@pytest.mark.long
@pytest.mark.parametrize(
    ("option", "code", "exit_code"),
    [
        ("sampler", "accelerate_loader.py:seeded", 0),
        ("sampler", "accelerate_loader.py:unseeded", 1),
        ("accumulation", "trainer.py:step", 0),
        ("loader", "trainer.py:loader", 0),
    ],
)
def test_examples_have_the_documented_verdicts(
    tmp_path: Path, option: str, code: str, exit_code: int
) -> None:
    done = smoke_data(f"--{option}", f"{EXAMPLES / code}", "--output", str(tmp_path / "run"))
    assert done.returncode == exit_code, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (own("sampler", "samplers.py", "raises"), "raised IndexError"),
        (own("sampler", "samplers.py", "absent"), "unknown function 'absent'"),
        (["--features", "plain"], "assay: --features are samples for --collator"),
        (["no/such/folder"], "assay: model 'no/such/folder'"),
    ],
)
def test_what_cannot_be_checked_exits_with_2_and_one_message(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = smoke_data(*arguments, "--output", str(tmp_path / "run"))
    assert done.returncode == 2, done.stderr
    told = (
        done.stderr[done.stderr.rindex("\nassay: ") + 1 :]
        if "\nassay: " in done.stderr
        else done.stderr
    )
    assert message in told
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_an_error_of_one_subject_keeps_the_verdicts_of_the_others(tmp_path: Path) -> None:
    raises = own("sampler", "samplers.py", "raises")
    wrong = own("collator", "collators.py", "pad_id_masked")
    done = smoke_data(*raises, *wrong, "--json", "--output", str(tmp_path / "run"))
    assert done.returncode == 2, done.stderr
    levels = json.loads(done.stdout)["levels"]
    assert (levels["collator"]["verdict"], levels["sampler"]["verdict"]) == ("FAIL", "NOT_COMPARED")
    assert "\nassay: " in done.stderr
    assert "raised IndexError" in done.stderr[done.stderr.index("\nassay: ") :]


def test_help_needs_no_torch() -> None:
    code = "import sys, assay_smoke.commands; print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert printed == b"False\n"
