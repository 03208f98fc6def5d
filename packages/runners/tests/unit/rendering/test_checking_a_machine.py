import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

# `python3` fails for an argument that contains $BROKEN, and complains as health.sh does.
PYTHON = """
case $* in *"${BROKEN:-nothing}"*) echo "assay: this machine must not be used: no acme-smi" >&2; exit 1 ;; esac
"""
LINES = {
    "git": "git",
    "curl": "curl",
    "openssl": "openssl",
    "c++": "a C++ compiler (g++): DeepSpeed compiles its CPU Adam at the first use",
    "version_info": "Python 3.11 or newer, as python3",
    "import pip": "pip for python3 (python3-pip)",
    "venv": "venv for python3 (python3-venv)",
    "Python.h": "the headers of python3 (python3-dev), for the C++ compiler",
    "import torch_rocket": "the vendor's torch for python3, which cannot import torch_rocket",
    "health.json": "the vendor's driver and health program: no acme-smi",
    "rocket0": "the vendor's driver, which makes one of: ",
}
Check = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def check(
    written: Path,
    programs: Path,
    put_program: Callable[[str, str], Path],
    call: Check,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Check:
    """Check a machine that has every program, but lacks the named ones."""
    for name in ("bash", "dirname", "env"):
        (programs / name).symlink_to(shutil.which(name) or "")
    for name in ("git", "curl", "openssl", "c++"):
        put_program(name, "")
    put_program("python3", PYTHON)
    (tmp_path / "rocket0").touch()
    monkeypatch.setenv("PATH", str(programs))
    settings = written / "acme/runner-8.env"
    node = f"ASSAY_DEVICE_NODES='{str(tmp_path)[1:]}/rocket[0-9]*'\n"
    settings.write_text(settings.read_text() + node)

    def run(*lacking: str) -> subprocess.CompletedProcess[str]:
        for name in lacking:
            for file in (programs / name, tmp_path / name):
                file.unlink(missing_ok=True)
        words = ("--check", str(settings))
        return call(written / "bare-metal/register.sh", *words, BROKEN=lacking[0])

    return run


def test_a_complete_machine_passes_in_silence(check: Check) -> None:
    done = check("nothing")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("lacking", LINES)
def test_each_missing_thing_is_named_alone(check: Check, lacking: str) -> None:
    done = check(lacking)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert line.startswith(f"assay: install {LINES[lacking]}")


def test_one_run_names_everything(check: Check) -> None:
    done = check("-I", "git", "curl", "openssl", "c++", "rocket0")
    lines = [line.removeprefix("assay: install ") for line in done.stderr.splitlines()]
    expected = [*LINES.values()]
    expected.insert(8, LINES["import torch_rocket"].replace("torch_rocket", "torch"))
    assert [line[:50] for line in lines[:-1]] == [line[:50] for line in expected[:-1]]
    assert lines[-1].startswith(expected[-1])
