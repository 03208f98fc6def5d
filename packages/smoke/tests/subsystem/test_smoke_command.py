"""`assay smoke` from the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from assay_smoke.matrix.rules import case_of
from packages.core.tests.subsystem.commands import run_command

PLANTED = Path(__file__).parents[1] / "planted_trainers.py"
EXAMPLE = Path(__file__).parents[4] / "examples" / "own_trainer.py"


def assay(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("smoke", *arguments)


def test_the_plan_is_printed_without_torch() -> None:
    code = (
        "import sys\nfrom assay.cli import main\n"
        "sys.argv[1:] = ['smoke', 'plan', '--vendor', 'amd', '--cards', '4', '--json']\n"
        "try:\n    main()\nfinally:\n"
        "    print({'torch', 'transformers'} & set(sys.modules), file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "set()\n"
    plan = json.loads(done.stdout)
    assert (plan["schema"], plan["vendor"]) == (1, "amd")
    assert plan["pairs"]["covered"] == plan["pairs"]["possible"] > 500
    assert len(plan["cases"]) > 30
    assert {case["case"]["framework"] for case in plan["cases"]} >= {"fsdp", "zero3", "pipeline"}


def test_a_plan_is_a_table_whose_ids_can_be_copied() -> None:
    done = assay("plan", "--cards", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["PAIRS", "CASE"]
    assert lines[1].split() == ["+66", "one-process-1"]
    assert all(case_of(line.split()[1]).cards <= 2 for line in lines[1 : lines.index("")])


def test_a_plan_that_means_nothing_exits_with_2_and_one_message() -> None:
    done = assay("plan", "--vendor", "nowhere")
    assert done.returncode == 2
    assert done.stderr.startswith("assay: --vendor nowhere: there is cpu, nvidia, ")
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("case", "text", "message"),
    [
        (
            "command:ci/train.toml",
            'lauch = "train.py"\n',
            "ci/train.toml: unknown key 'lauch'; did you mean launch?",
        ),
        (
            "command:ci/train.toml",
            (
                'launch = "python train.py"\nresume = "--from {resume_from}"\n'
                "losses.pattern = '(?P<loss>.)'\ncheckpoints.folder = '{output}/{step}'\n"
            ),
            "ci/train.toml: launch: {}/ci/train.py does not exist",
        ),
        ("ci/train.toml", "", "ci/train.toml is not a case; for a library's file write command:"),
    ],
)
def test_a_plan_of_ci_finds_what_the_job_refuses(
    tmp_path: Path, case: str, text: str, message: str
) -> None:
    (tmp_path / "ci").mkdir()
    (tmp_path / "ci/train.toml").write_text(text)
    (tmp_path / "assay.toml").write_text(
        f'[machines.box]\nrun = "cpu/float32"\n[[smoke]]\ncase = "{case}"\n'
    )
    done = run_command("ci", "plan", "--root", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith(f"assay: assay.toml: smoke: {message.format(tmp_path)}")


@pytest.mark.parametrize("trainer", ["reference", f"{EXAMPLE}:OwnTrainer"])
def test_a_case_of_one_process_passes(tmp_path: Path, trainer: str) -> None:
    output = str(tmp_path / "run")
    done = assay("run", "one-process-1", "--trainer", trainer, "--output", output)
    assert done.returncode == 0, done.stderr
    result, *_ = done.stdout.splitlines()
    assert result.startswith("[1/1] PASS one-process-1 (")


@pytest.mark.long
def test_a_case_passes_and_a_planted_one_fails_by_name(tmp_path: Path) -> None:
    clean, planted = tmp_path / "clean", tmp_path / "planted"

    done = assay("run", "fsdp-2-lora-sigterm", "--output", str(clean), "--json")
    assert done.returncode == 0, done.stderr
    assert "[1/1] PASS fsdp-2-lora-sigterm (" in done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((clean / "session.json").read_text())
    (case,) = report["cases"]
    assert (case["name"], case["outcome"]) == ("fsdp-2-lora-sigterm", "PASS")
    worlds = {phase["world"] for phase in case["phases"]}
    assert worlds == {"train", "terminate", "resume", "read"}
    verdict = json.loads((clean / "cases/fsdp-2-lora-sigterm/verdict.json").read_text())
    ran = {name for name, level in verdict["levels"].items() if level["verdict"] == "PASS"}
    assert ran >= {"trained", "loss", "updates", "replicas", "checkpoint", "sigterm", "resume"}
    assert "fsdp-2-lora-sigterm" in (clean / "index.html").read_text()

    trainer = f"{PLANTED}:RankKilledInAStep"
    done = assay("run", "fsdp-2", "--trainer", trainer, "--output", str(planted))
    assert done.returncode == 1, done.stderr
    result, *reason, logs, summary, report = done.stdout.splitlines()
    assert result.startswith("[1/1] FAIL fsdp-2 (")
    assert "rank 1 of a world of 2 ranks (dp=2) was ended by SIGKILL" in "\n".join(reason)
    assert logs == f"    logs: {planted / 'cases/fsdp-2'}"
    assert summary.startswith("1 FAIL on cpu: 1 case in ")
    assert report == f"report: {planted / 'index.html'}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "nowhere"], "assay: unknown device 'nowhere'"),
        (["fsdp-2", "--trainer", "nowhere.py:Trainer"], "assay: nowhere.py:Trainer: there is no"),
        (["fsdp-2-lorra"], "assay: no case is called 'fsdp-2-lorra'"),
        (["one-process-2"], "assay: one-process-2 cannot be run"),
        (["fsdp-2", "--cards", "1"], "assay: fsdp-2 needs 2 cards, and --cards is 1"),
    ],
)
def test_what_cannot_be_run_exits_with_2_and_one_message(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = assay("run", "--output", str(tmp_path / "run"), *arguments)

    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(message)
    assert done.stdout == ""
