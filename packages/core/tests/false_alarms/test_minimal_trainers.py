"""Loops of many styles: correct ones never fail, and a fault in a phase fails or is declared.

`minimal_trainers.py` has the loops. The session prints a table of styles and faults.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from assay.training.reports import TrainOptions
from assay.verdicts import Outcome, Verdict
from packages.core.tests.false_alarms import minimal_trainers
from packages.core.tests.false_alarms.minimal_trainers import FAULTS, STYLES
from packages.core.tests.trials.tables import markdown_table, publish
from packages.core.tests.trials.training_trial import TrainingGroup, TrainingTrial, train
from packages.core.tests.trials.trial import run_all

FILE = Path(__file__).with_name("minimal_trainers.py")
# Styles with every fault in float32, too: others differ from them in what bfloat16 shows as well.
IN_FLOAT32 = ("Plain", "Closure", "ClipsBetweenMethods", "WarmsUp", "NoDecayOfNorms")


@dataclass(frozen=True)
class Loop:
    """A loop in one dtype; `fault` is empty for a correct one."""

    style: str
    fault: str
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.style}__{self.fault}" if self.fault else self.style

    @property
    def options(self) -> TrainOptions:
        plan = getattr(getattr(minimal_trainers, self.style), "stated_plan", {})
        return TrainOptions.model_validate({"model": "micro:llama"} | plan)

    @property
    def golden(self) -> str:
        return f"{self.dtype} {self.options.model_dump_json()}"


LOOPS = [
    *(Loop(style, fault, "bfloat16") for style in STYLES for fault in ("", *FAULTS)),
    *(Loop(style, "", "float32") for style in STYLES),
    *(Loop(style, fault, "float32") for style in IN_FLOAT32 for fault in FAULTS),
]


@pytest.fixture(scope="module")
def verdicts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Loop, Verdict]:
    option = request.config.getoption
    loops = [loop for loop in LOOPS if option("--variant") in f"{loop.name} {loop.dtype}"]
    loops = option("--part").take(loops, lambda loop: f"{loop.style} {loop.dtype}")
    if not loops:
        pytest.skip(f"no loop has {option('--variant')!r} in its name")
    found = judge(loops, tmp_path_factory.mktemp("loops"))
    text = table(found)
    request.config.get_terminal_writer().line(f"\n{text}")
    if option("--publish"):
        publish("minimal trainers", totals(found), minimal_trainers=text)
    return found


def judge(loops: list[Loop], folder: Path) -> dict[Loop, Verdict]:
    """Check the loops, golden by golden."""
    sharing: dict[str, list[Loop]] = {}
    for loop in loops:
        sharing.setdefault(loop.golden, []).append(loop)
    groups = [
        TrainingGroup(some[0].options, some[0].dtype, folder / str(number), tuple(map(trial, some)))
        for number, some in enumerate(sharing.values())
    ]
    outcomes = run_all(train, groups, 1)
    return {
        loop: outcome.verdict
        for some, done in zip(sharing.values(), outcomes, strict=True)
        for loop, outcome in zip(some, done, strict=True)
    }


def trial(loop: Loop) -> TrainingTrial:
    return TrainingTrial(loop.name, f"cpu/{loop.dtype}", f"{FILE}:{loop.name}")


def table(verdicts: dict[Loop, Verdict]) -> str:
    """A line for each style, with its dtype unless it is bfloat16, and a column for each fault."""
    cells = {(one.style, one.dtype, one.fault): cell(one, v) for one, v in verdicts.items()}
    lines = sorted({(one.style, one.dtype) for one in verdicts})
    columns = ("", *FAULTS)
    rows = [
        (
            ", ".join(line).removesuffix(", bfloat16"),
            *(cells.get((*line, one), "") for one in columns),
        )
        for line in lines
    ]
    return markdown_table(("style", "correct", *FAULTS), rows)


def totals(verdicts: dict[Loop, Verdict]) -> str:
    """Count the faults that are found in their phase, and those whose phase the verdict calls not visible."""
    cells = [cell(one, v) for one, v in verdicts.items() if one.fault]
    found = sum(one.startswith("found, ") for one in cells)
    hidden = sum(one.startswith("not visible, ") for one in cells)
    return (
        f"Of {len(cells)} faults {found} are found in their phase. {hidden} are in a phase that the verdict calls not"
        " visible."
    )


def cell(loop: Loop, verdict: Verdict) -> str:
    """`found` at its phase; else the verdict, its phase and diagnosis, and if the phase is visible."""
    if not loop.fault:
        return verdict.verdict
    if phase_of(verdict) == FAULTS[loop.fault]:
        return f"found, {verdict.diagnosis}"
    found = f"found in {phase_of(verdict)}" if is_failed(verdict) else "not found"
    return f"not visible, {found}" if is_declared(loop, verdict) else found


def phase_of(verdict: Verdict) -> str | None:
    return verdict.location.phase if is_failed(verdict) and verdict.location else None


def is_failed(verdict: Verdict) -> bool:
    return verdict.verdict is Outcome.FAIL


def is_declared(loop: Loop, verdict: Verdict) -> bool:
    return any(note.startswith(f"{FAULTS[loop.fault]} is not visible") for note in verdict.notes)


def test_no_correct_loop_fails(verdicts: dict[Loop, Verdict]) -> None:
    # A check that came to no verdict has no levels.
    failed = [
        one for one, v in verdicts.items() if not one.fault and (is_failed(v) or not v.levels)
    ]

    assert not failed


def test_every_fault_is_found_in_its_phase_or_that_is_declared_invisible(
    verdicts: dict[Loop, Verdict],
) -> None:
    missed = [
        loop
        for loop, verdict in verdicts.items()
        if loop.fault and phase_of(verdict) != FAULTS[loop.fault] and not is_declared(loop, verdict)
    ]

    assert not missed
