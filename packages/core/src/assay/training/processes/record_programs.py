"""Record the programs that made wrong values of a training step, for `assay reproduce`."""

from typing import Any

from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.launch import Rank
from assay.replay.value_programs import ProgramFinder, RecordedValue, Wanted
from assay.runs import Progress
from assay.training.processes.candidate import Candidate
from assay.training.processes.reference import replay_golden
from assay.training.replay.step_observer import ReplayedSteps
from assay.training.reports import TrainCheck


def record_programs(
    request: tuple[TrainCheck, Wanted], progress: Progress, rank: Rank | None = None
) -> list[RecordedValue]:
    """Record the programs of one side. Returns: the candidate's worst value of each port, or each of `sites`."""
    check, wanted = request
    found: dict[Any, RecordedValue] = {}

    def observe(steps: ReplayedSteps) -> None:
        model, trace = steps.opened.trainer.model, steps.modules.trace
        finder = ProgramFinder(model, wanted=wanted, trace=trace, found=found)
        steps.modules.observer = steps.handler.observer = finder
        steps.recording = finder.of_step

    with progress.task("recording the operations", check.options.steps, "steps"):
        if wanted.sites:
            replay_golden(check, open_run(parse_run(check.reference)), None, observe)
        else:
            side = Candidate(check, progress, rank)
            side.replay(side.begin(side.open()).own, observe=observe)
    return [*found.values()]
