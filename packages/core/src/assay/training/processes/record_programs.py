"""Record the programs that made wrong values of a training step, for `assay reproduce`."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.launch import Rank
from assay.recording.programs import ProgramRecorder
from assay.replay.value_programs import ProgramFinder, RecordedValue, Wanted
from assay.runs import Progress
from assay.training.model_batches import TrainingData
from assay.training.processes.candidate import CandidateSide
from assay.training.processes.free_run import step_until_made
from assay.training.processes.reference import TrustedSide
from assay.training.protocol import MicroBatch
from assay.training.replay.determinism import comparable
from assay.training.replay.step_observer import ReplayedSteps
from assay.training.replay.step_values import RunRows
from assay.training.reports import TrainCheck
from assay.training.state.files import read_golden_state
from assay.training.state.states import inject_state
from assay.training.trainers.registry import OpenedTrainer


def record_programs(
    request: tuple[TrainCheck, Wanted], progress: Progress, rank: Rank | None = None
) -> list[RecordedValue]:
    """Record the programs of one side. Returns: the candidate's worst value of each port, or each of `sites`."""
    check, wanted = request
    record = _record_reference if wanted.sites else partial(_record_candidate, rank=rank)
    with progress.step("recording the operations"):
        return record(check, wanted)


def _record_candidate(check: TrainCheck, wanted: Wanted, rank: Rank | None) -> list[RecordedValue]:
    side = CandidateSide(check, rank)
    start = side.begin(side.open()).own
    opened, steps = side.open_replay()

    def begin(number: int) -> None:
        state = read_golden_state(side.golden, number) if number else start
        inject_state(opened.trainer, side.own_part(opened, state), side.device.torch_device)

    with comparable(side.run.dtype, side.device):
        return _replay(opened, steps, side.batches, begin, wanted)


def _record_reference(check: TrainCheck, wanted: Wanted) -> list[RecordedValue]:
    device = open_run(parse_run(check.reference))
    data = TrainingData.read(check.golden)
    batches = data.batches
    check = replace(check, options=check.options.model_copy(update={"loss": data.loss}))
    side = TrustedSide(check, device, None)
    opened = OpenedTrainer.of(side.trainer, "reference")
    rows = RunRows.of_batches(batches)
    steps = ReplayedSteps(opened, check.golden, rows, side.boundary, frozenset())

    def begin(number: int) -> None:
        inject_state(side.trainer, read_golden_state(check.golden, number), device.torch_device)
        side.trainer.load_counters({"num_steps": number})

    with comparable(side.dtype, device):
        return _replay(opened, steps, batches, begin, wanted)


def _replay(
    opened: OpenedTrainer,
    steps: ReplayedSteps,
    batches: Sequence[Sequence[MicroBatch]],
    begin: Callable[[int], None],
    wanted: Wanted,
) -> list[RecordedValue]:
    """Replay all steps up to the wanted one, and record there."""
    recorder = ProgramRecorder(opened.trainer.model)
    finder = ProgramFinder(wanted, recorder, steps.modules.trace)
    steps.modules.observer = steps.handler.observer = finder
    with steps.attached():
        for number, batch in enumerate(batches):
            begin(number)
            recorder.forget()
            with recorder if wanted.step in (None, number) else nullcontext():
                step_until_made(partial(steps.run_step, number, batch), None)
    return [*finder.found.values()]
