"""Record the programs of both sides that made wrong values of a training step, for `assay reproduce`."""

from dataclasses import replace
from functools import partial

from assay.devices.run_string import parse_run
from assay.launch import RemoteFunction, world_of
from assay.recording.programs import ProgramPair
from assay.replay.value_programs import RecordedValue, Wanted, pair_programs
from assay.runs import Progress
from assay.training.check import PRELOAD
from assay.training.processes.record_programs import WantedPrograms
from assay.training.reports import TrainCheck

_RECORD: RemoteFunction[WantedPrograms, list[RecordedValue]] = RemoteFunction(
    "assay.training.processes.record_programs:record_programs", PRELOAD
)


def record_pairs(check: TrainCheck, wanted: Wanted, progress: Progress) -> list[ProgramPair]:
    """Record both sides' programs of the wanted values, each of the micro-batch with the largest error.

    check: `golden` is that of the run.
    """
    return pair_programs(
        _RECORD,
        partial(WantedPrograms, replace(check, folder=wanted.folder)),
        wanted,
        progress,
        world=world_of(check.mesh, parse_run(check.candidate).device),
        python=check.python,
    )
