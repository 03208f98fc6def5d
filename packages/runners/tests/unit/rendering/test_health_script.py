import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from assay_runners.fleet import Fleet

Put = Callable[[str, str], Path]
Call = Callable[..., subprocess.CompletedProcess[str]]

TWO_CARDS = "echo 'card 0 \"ok\"'; echo 'card 1 \"burnt\"'; echo 'card 12 \"ok\"'"
SICK = "assay: this machine must not be used: acme-smi "


@pytest.fixture
def health(written: Path, tmp_path: Path) -> Path:
    """Install the script and a vendor's settings into one folder, as on a machine."""
    folder = tmp_path / "opt"
    folder.mkdir()
    shutil.copy(written / "acme/health.json", folder)
    return Path(shutil.copy(written / "health.sh", folder))


@pytest.mark.parametrize("cards", ["0", "1", "2"])
def test_a_machine_with_its_cards_is_healthy(
    health: Path, put_program: Put, call: Call, cards: str
) -> None:
    put_program("acme-smi", TWO_CARDS)
    done = call(health, ASSAY_CARDS=cards)
    assert (done.returncode, done.stdout, done.stderr) == (
        0, "assay: acme-smi lists 2 fit cards\n", "",
    )  # fmt: skip


def test_the_vendors_program_gets_the_arguments_of_the_entry(
    health: Path, put_program: Put, call: Call, tmp_path: Path
) -> None:
    put_program("acme-smi", f"printf '%s\\n' \"$@\" >{tmp_path}/asked; {TWO_CARDS}")
    assert call(health).returncode == 0
    assert (tmp_path / "asked").read_text() == '--list\nit\'s "all"\n'


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            TWO_CARDS,
            'lists 2 fit cards; 3 were promised; it prints card 0 "ok" card 1 "burnt" card 12 "ok"',
        ),
        ("true", "lists 0 fit cards; 3 were promised; it prints nothing"),
        ("echo one >&2; echo 'no driver' >&2; exit 9", "exits with 9: no driver"),
        ("echo 'lost card 4'; exit 1", "exits with 1: lost card 4"),
        ("kill -SEGV $$", "exits with -11: "),
        (None, "cannot be run: No such file or directory"),
    ],
)
def test_a_sick_machine_is_one_line_and_exit_75(
    health: Path, put_program: Put, call: Call, fleet: Fleet, program: str | None, message: str
) -> None:
    if program is not None:
        put_program("acme-smi", program)
    done = call(health, ASSAY_CARDS="3")
    assert (done.returncode, done.stdout, done.stderr) == (75, "", f"{SICK}{message}\n")


def test_a_hung_program_is_killed_with_its_children(
    health: Path, put_program: Put, call: Call
) -> None:
    put_program("acme-smi", "trap '' TERM; sleep 50 & sleep 50")
    started = time.monotonic()
    done = call(health, ASSAY_CARDS="1", ASSAY_HEALTH_SECONDS="0.5")
    assert (done.returncode, done.stderr) == (75, f"{SICK}did not answer within 0.5 s\n")
    assert time.monotonic() - started < 20


def test_an_invalid_number_of_cards_is_sick(health: Path, put_program: Put, call: Call) -> None:
    put_program("acme-smi", TWO_CARDS)
    done = call(health, ASSAY_CARDS="all")
    assert done.returncode == 75
    assert "ASSAY_CARDS or ASSAY_HEALTH_SECONDS is not a number" in done.stderr


@pytest.mark.parametrize("text", [None, "", "[]", '{"command": ["true"]}'])
def test_unreadable_settings_are_sick(health: Path, call: Call, text: str | None) -> None:
    settings = health.with_name("health.json")
    settings.unlink()
    if text is not None:
        settings.write_text(text)
    done = call(health)
    assert done.returncode == 75
    assert f"must not be used: {settings} cannot be read: " in done.stderr


def test_modules_left_by_a_job_are_not_imported(
    health: Path, put_program: Put, call: Call, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    put_program("acme-smi", "true")
    for name in ("re.py", "subprocess.py"):
        (tmp_path / name).write_text("raise SystemExit(0)\n")
    monkeypatch.chdir(tmp_path)
    assert call(health, PYTHONPATH=str(tmp_path)).returncode == 75
