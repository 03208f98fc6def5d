"""The rendered scripts, run with programs in the places of the vendor's, curl and GitHub's runner."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[5]
HEALTH = ROOT / "runners/nvidia/health.sh"
REGISTER = ROOT / "runners/bare-metal/register.sh"
BOOTSTRAP = ROOT / "runners/bare-metal/bootstrap.sh"
TOKEN = "a-token-that-nobody-may-see"  # noqa: S105 - one of a test

# Notes its arguments and what it reads through file descriptors, and answers as GitHub does.
CURL = f"""#!{sys.executable}
import json, sys
from pathlib import Path
here = Path(__file__).parent
read = [Path(word[1:]).read_text() for word in sys.argv if word.startswith("@/")]
(here / "curl.json").write_text(json.dumps([sys.argv[1:], read]))
print(json.dumps({{"encoded_jit_config": "configuration", "runner": {{"id": 5}}}}))
"""


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


def run(
    script: Path, folder: Path, *words: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    env = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "HOME": str(folder), **variables}
    return subprocess.run(
        [script, *words], capture_output=True, text=True, check=False, env=env, timeout=60
    )


def test_scripts_pass_shellcheck() -> None:
    scripts = sorted(ROOT.glob("runners/*/*.sh"))
    assert len(scripts) >= 10
    found = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize(
    ("cards", "listed", "code", "told"),
    [
        ("1", "echo 'GPU 0: H200'", 0, ""),
        ("2", "echo 'GPU 0: H200'; echo 'GPU 1: H200'", 0, ""),
        ("2", "echo 'GPU 0: H200'", 75, "nvidia-smi lists 1 cards; 2 were promised"),
        ("1", "echo 'No devices'", 75, "nvidia-smi lists 0 cards; 1 were promised"),
        ("1", "echo 'no driver' >&2; exit 9", 75, "nvidia-smi exits with 9: no driver"),
    ],
)
def test_a_machine_takes_jobs_if_its_cards_answer(
    tmp_path: Path, cards: str, listed: str, code: int, told: str
) -> None:
    program(tmp_path, "nvidia-smi", f"#!/bin/sh\n{listed}\n")
    done = run(HEALTH, tmp_path, ASSAY_CARDS=cards)
    assert (done.returncode, done.stderr) == (
        code, f"this machine takes no jobs: {told}\n" if told else "",
    )  # fmt: skip


def test_a_program_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    # It ignores what asks it to end, as one that waits for its driver does.
    program(tmp_path, "nvidia-smi", "#!/bin/sh\ntrap '' TERM INT\nsleep 50\n")
    started = time.monotonic()
    done = run(HEALTH, tmp_path, ASSAY_HEALTH_SECONDS="1")
    assert (done.returncode, time.monotonic() - started < 20) == (75, True)
    assert "nvidia-smi did not answer within 1 s" in done.stderr


def test_a_missing_program_is_told(tmp_path: Path) -> None:
    done = run(HEALTH, tmp_path)
    assert done.returncode == 75
    assert "nvidia-smi cannot be run: No such file" in done.stderr


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """What a unit gives to register.sh, with curl and the runner in their places."""
    program(tmp_path, "curl", CURL)
    (tmp_path / "token").write_text(TOKEN)
    runner = program(tmp_path, "run.sh", f'#!/bin/sh\necho "$@" > {tmp_path}/ran\n')
    return {
        "CREDENTIALS_DIRECTORY": str(tmp_path), "ASSAY_ORGANIZATION": "o", "ASSAY_GROUP_ID": "7",
        "ASSAY_LABEL": "assay-nvidia-4", "ASSAY_RUN": str(runner),
        "ASSAY_HEALTH": str(program(tmp_path, "health.sh", "#!/bin/sh\nexit 0\n")),
    }  # fmt: skip


def test_a_runner_is_for_one_job_and_its_token_in_no_argument(
    tmp_path: Path, machine: dict[str, str]
) -> None:
    done = run(REGISTER, tmp_path, **machine)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "ran").read_text() == "--jitconfig configuration\n"
    words, read = json.loads((tmp_path / "curl.json").read_text())
    assert TOKEN not in " ".join(words)
    assert read == [f"Authorization: Bearer {TOKEN}\n"]
    body = json.loads(words[words.index("--data") + 1])
    assert (body["labels"], body["runner_group_id"]) == (["assay-nvidia-4"], 7)
    assert words[-1] == "https://api.github.com/orgs/o/actions/runners/generate-jitconfig"


def test_a_sick_machine_does_not_register(tmp_path: Path, machine: dict[str, str]) -> None:
    program(tmp_path, "health.sh", "#!/bin/sh\nexit 75\n")
    assert run(REGISTER, tmp_path, **machine).returncode == 75
    assert not (tmp_path / "curl.json").exists()


def test_a_machine_without_a_group_does_not_register(
    tmp_path: Path, machine: dict[str, str]
) -> None:
    done = run(REGISTER, tmp_path, **{**machine, "ASSAY_GROUP_ID": ""})
    assert (done.returncode, done.stderr) == (
        78,
        "ASSAY_GROUP_ID is empty: the number of the runner group\n",
    )


def test_what_github_refuses_starts_no_runner(tmp_path: Path, machine: dict[str, str]) -> None:
    program(tmp_path, "curl", "#!/bin/sh\nexit 22\n")
    assert run(REGISTER, tmp_path, **machine).returncode != 0
    assert not (tmp_path / "ran").exists()


def test_an_archive_with_another_checksum_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "runner.tar.gz"
    archive.write_bytes(b"not the runner")
    settings = ROOT / "runners/nvidia/runner.env"
    done = run(BOOTSTRAP, tmp_path, str(settings), str(archive), "0" * 64)
    assert (done.returncode, done.stderr) == (
        2, f"{archive} is not the file with the checksum {'0' * 64}\n",
    )  # fmt: skip
    assert run(BOOTSTRAP, tmp_path).returncode == 2
