"""Loops of many styles: correct ones never fail, and a fault in a phase fails or is declared.

`minimal_trainers.py` has the loops. The session prints a table of all verdicts.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from assay.runs import SilentProgress
from assay.training.check import TrainCheck, check_candidate, record_golden, with_user_code
from assay.training.processes.requests import TrainOptions
from assay.verdicts import Outcome, Verdict
from packages.core.tests.false_alarms.minimal_trainers import FAULTS, STYLES
from packages.core.tests.trials.tables import markdown_table
from packages.core.tests.trials.trial import run_all

FILE = Path(__file__).with_name("minimal_trainers.py")
DTYPES = ("float32", "bfloat16")
PHASES = {"accumulation": "backward"}


@dataclass(frozen=True)
class Loop:
    """A loop in one dtype; `fault` is empty for a correct one."""

    style: str
    fault: str
    dtype: str
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.style}__{self.fault}" if self.fault else self.style


def judge(loop: Loop) -> Verdict:
    """Check a loop against a golden of its own."""
    folder = loop.folder / f"{loop.name}-{loop.dtype}"
    folder.mkdir()
    options = TrainOptions(model="micro:llama")
    check = TrainCheck(options, "cpu/float32", f"cpu/{loop.dtype}", trainer=f"{FILE}:{loop.name}")
    check = with_user_code(check, folder, SilentProgress())
    record_golden(check, folder / "golden", SilentProgress())
    return check_candidate(check, folder / "golden", folder, SilentProgress())


@pytest.fixture(scope="module")
def verdicts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Loop, Verdict]:
    folder = tmp_path_factory.mktemp("loops")
    loops = [Loop(s, "", dtype, folder) for s in STYLES for dtype in DTYPES]
    loops += [Loop(s, fault, "bfloat16", folder) for s in STYLES for fault in FAULTS]
    wanted = request.config.getoption("--variant")
    loops = [loop for loop in loops if wanted in loop.name]
    if not loops:
        pytest.skip(f"no loop has {wanted!r} in its name")
    found = dict(zip(loops, run_all(judge, loops), strict=True))
    rows = [row_of(loop, verdict) for loop, verdict in found.items()]
    head = ("loop", "fault", "dtype", "verdict", "phase", "diagnosis", "not visible")
    request.config.get_terminal_writer().line(f"\n{markdown_table(head, rows)}")
    return found


def row_of(loop: Loop, verdict: Verdict) -> tuple[str, ...]:
    phase = verdict.location.phase if verdict.location else ""
    hidden = ", ".join(invisible(verdict))
    return (
        loop.style, loop.fault, loop.dtype, verdict.verdict, phase, verdict.diagnosis or "", hidden
    )  # fmt: skip


def invisible(verdict: Verdict) -> list[str]:
    return [note.split(" is not")[0] for note in verdict.notes if " is not visible" in note]


def test_no_correct_loop_fails(verdicts: dict[Loop, Verdict]) -> None:
    failed = [loop for loop, verdict in verdicts.items() if not loop.fault and is_failed(verdict)]

    assert not failed


def test_every_fault_fails_or_its_phase_is_declared_invisible(
    verdicts: dict[Loop, Verdict],
) -> None:
    missed = [
        loop
        for loop, verdict in verdicts.items()
        if loop.fault
        and not is_failed(verdict)
        and PHASES.get(loop.fault, loop.fault) not in invisible(verdict)
    ]

    assert not missed


def is_failed(verdict: Verdict) -> bool:
    return verdict.verdict is Outcome.FAIL
