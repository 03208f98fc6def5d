"""Find the first wrong operation in the call of a module that failed.

Yardstick, noise run and candidate record the outputs of each operation in this call, in their own processes.
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.dtypes import float_format
from assay.errors import UsageError
from assay.estimates import allowed_memory
from assay.generate.candidate import load_candidate
from assay.generate.capture import load_reference, load_yardstick
from assay.generate.generation_loop import count_tokens, timeline_of
from assay.generate.golden import GoldenSection
from assay.generate.passes import Side, Work, run_forced, whole_batches
from assay.generate.run_plan import widening_within
from assay.generate.spec import PRELOAD, GenerateCheck
from assay.hooks.module_tracer import ModuleTracer
from assay.judge.limits import load_limits
from assay.launch import Rank, RemoteFunction, call, world_of
from assay.models.config_files import attention_of
from assay.models.load import choose_threads
from assay.recording.modules import Operation, OperationRecorder
from assay.replay.modules import Replayer
from assay.replay.operations import find_wrong_operation, put_together
from assay.runs import Progress
from assay.sites import CallSite

TrustedRun = Literal["yardstick", "noise"]


class ModuleCall(NamedTuple):
    """A call whose operations one side of a check records."""

    check: GenerateCheck
    side: Literal["reference", "candidate"]
    site: CallSite
    separate: tuple[str, ...] = ()
    """Of the reference: the modules inside the call that the candidate calls and that have their own stages."""


class RecordedOperations(NamedTuple):
    """The operations of one run in the call."""

    operations: list[Operation]
    called: set[str]
    """Modules that ran some of them."""


_OPERATIONS: "RemoteFunction[ModuleCall, list[RecordedOperations]]" = RemoteFunction(
    "assay.generate.find_operation:record_operations", PRELOAD
)


def find_operation(check: GenerateCheck, site: CallSite, progress: Progress) -> str | None:
    """Return the first wrong operation of the call at `site`; None if none exceeds its limit."""
    ask = partial(call, _OPERATIONS, folder=check.folder, progress=progress)
    by_rank = ask(
        ModuleCall(check, "candidate", site),
        name="operations-candidate",
        world=world_of(check.mesh, check.candidate.device),
        python=check.python,
    )
    candidates = [run for (run,) in by_rank]
    # Modules that the candidate never calls, such as a fused activation, belong to the stage of their caller.
    called = sorted(set().union(*(run.called for run in candidates)))
    wanted = ModuleCall(check, "reference", site, tuple(called))
    ((yardstick, noise),) = ask(wanted, name="operations-reference")
    recorded = GoldenSection.open(check.golden_folder, check.dtype).steps.find(site)
    of_ranks = [run.operations for run in candidates]
    whole = put_together(of_ranks, yardstick.operations, noise.operations)
    if whole is None:
        raise UsageError("the ranks run other operations than each other")
    wrong = find_wrong_operation(
        *whole,
        load_limits(check.limits),
        float_format(check.dtype).unit_roundoff,
        recorded.rows if recorded is not None else None,
    )
    return wrong.name if wrong is not None else None


def record_operations(
    wanted: ModuleCall, progress: Progress, rank: Rank | None = None
) -> list[RecordedOperations]:
    """Record the operations of one call: of the candidate or one rank of it, or of yardstick and noise run."""
    check = wanted.check
    section = GoldenSection.open(check.golden_folder, check.dtype)
    golden = section.golden
    work = shortened(section, wanted.site)
    num_tokens = count_tokens([work.batch])
    module = wanted.site.module
    if wanted.side == "candidate":
        with progress.step(f"loading {check.model}"):
            side = load_candidate(check, golden, rank)
        with progress.task(f"recording operations of {module}", num_tokens, "tokens"):
            return [_operations(side, section, work, wanted.site, None)]
    found = []
    names: tuple[TrustedRun, ...] = ("yardstick", "noise")
    for name in names:
        with progress.task(f"{name}: recording operations of {module}", num_tokens, "tokens"):
            trusted = load_trusted(check, section, name)
            found.append(_operations(trusted, section, work, wanted.site, wanted.separate))
    return found


def load_trusted(check: GenerateCheck, section: GoldenSection, name: TrustedRun) -> Side:
    """Load the model of the golden's device as it is here."""
    golden, wide = section.golden, section.entry.yardstick_dtype
    choose_threads(golden.model.num_parameters)
    device, code = open_run(parse_run(golden.reference["run"])), check.remote_code
    if name == "noise":
        return Side(load_reference(check.model, device, check.dtype, code), device)
    allowed = allowed_memory(device, check.max_memory)
    widening = widening_within(golden.model.num_parameters, wide, allowed)
    loaded = load_yardstick(check.model, device, wide, check.dtype, code, widening)
    return Side(loaded, device)


def shortened(section: GoldenSection, site: CallSite) -> Work:
    """Return the batch of the call, without the steps after it."""
    number = site.micro_batch
    work = next((w for w in whole_batches(section.batches) if w.batch.number == number), None)
    if work is None:
        raise UsageError(f"the golden has no batch {number}")
    if not work.batch.max_new_tokens:
        return work
    steps = min(work.batch.max_new_tokens, site.step + 1)
    return Work(replace(work.batch, max_new_tokens=steps), work.source)


def _operations(
    side: Side,
    section: GoldenSection,
    work: Work,
    site: CallSite,
    separate: tuple[str, ...] | None,
) -> RecordedOperations:
    """Run a side on the recorded inputs, and return the operations of the call at `site`."""
    tracer = ModuleTracer(open_replay(side, section, work))
    recorder = OperationRecorder(tracer, (site.module, site.step, 0), separate)
    run_inside(recorder, tracer, side, section, work)
    return RecordedOperations(recorder.operations, recorder.called)


def open_replay(side: Side, section: GoldenSection, work: Work) -> Replayer:
    """Return what replays `work` step by step."""
    attention = attention_of(side.loaded)
    return Replayer(
        section.steps, section.boundary, attention, layout=side.layout, source=work.source
    )


def run_inside(
    recorder: AbstractContextManager[Any],
    tracer: ModuleTracer,
    side: Side,
    section: GoldenSection,
    work: Work,
) -> None:
    """Run a side on the recorded tokens, with its operations inside `recorder`."""
    numbers = [batch.number for batch in section.batches]
    tokens = section.tensors("tokens")[numbers.index(work.batch.number)]
    with tracer.attached(side.loaded.model):
        tracer.begin_batch(work.batch.number, timeline_of(work.batch))
        run_forced(side, work, tokens[:, : work.batch.max_new_tokens], recorder)
