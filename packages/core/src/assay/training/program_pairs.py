"""Record the programs of both sides that made wrong values of a training step, for `assay reproduce`."""

from dataclasses import replace
from pathlib import Path

from assay.devices.run_string import parse_run
from assay.launch import RemoteFunction, call, world_of
from assay.recording.programs import ProgramPair
from assay.replay.value_programs import RecordedValue, Wanted, pair_programs
from assay.reproduce.wrong_values import WrongValue
from assay.runs import Progress
from assay.sites import Phase
from assay.training.check import PRELOAD, with_user_code
from assay.training.reports import TrainCheck

_RECORD: RemoteFunction[tuple[TrainCheck, Wanted], list[RecordedValue]] = RemoteFunction(
    "assay.training.processes.record_programs:record_programs", PRELOAD
)

_FIND: RemoteFunction[tuple[TrainCheck, Phase], list[WrongValue]] = RemoteFunction(
    "assay.training.processes.wrong_values:find_wrong_values", PRELOAD
)


def find_wrong_state(
    check: TrainCheck, phase: Phase, folder: Path, progress: Progress
) -> list[WrongValue]:
    """Return the candidate's weights, moments and settings that are wrong where a `phase` failed."""
    check = with_user_code(replace(check, folder=folder), folder, progress)
    by_rank = call(
        _FIND,
        (check, phase),
        folder=folder,
        name="candidate",
        progress=progress,
        world=world_of(check.mesh, parse_run(check.candidate).device),
        python=check.python,
    )
    return [one for of_rank in by_rank for one in of_rank]


def record_pairs(check: TrainCheck, wanted: Wanted, progress: Progress) -> list[ProgramPair]:
    """Record both sides' programs of the wanted values, each of the micro-batch with the largest error.

    check: `golden` is that of the run.
    """
    check = with_user_code(check, wanted.folder, progress)
    return pair_programs(
        _RECORD,
        replace(check, folder=wanted.folder),
        wanted,
        progress,
        world=world_of(check.mesh, parse_run(check.candidate).device),
        python=check.python,
    )
