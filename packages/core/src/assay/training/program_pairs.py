"""Record the programs of both sides that made wrong values of a training step, for `assay reproduce`."""

from dataclasses import replace

from assay.devices.run_string import parse_run
from assay.launch import RemoteFunction, call, world_of
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
    check = replace(check, folder=wanted.folder)
    world = world_of(check.mesh, parse_run(check.candidate).device)

    def candidate(wanted: Wanted) -> list[RecordedValue]:
        request, name = WantedPrograms(check, wanted), "candidate"
        folder = check.folder
        by_rank = call(
            _RECORD, request, world=world, folder=folder, name=name, progress=progress,
            python=check.python,
        )  # fmt: skip
        return [one for of_rank in by_rank for one in of_rank]

    def reference(wanted: Wanted) -> list[RecordedValue]:
        request, name = WantedPrograms(check, wanted), "reference"
        return call(_RECORD, request, folder=check.folder, name=name, progress=progress)[0]

    return pair_programs(candidate, reference, wanted)
