"""Find the first wrong operation in the call of a module that failed.

Yardstick, noise run and candidate record the outputs of each operation in this call, in their own processes.
"""

from dataclasses import replace
from math import prod
from pathlib import Path
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
from assay.runs.results import rank_folder
from assay.sites import CallSite
from assay.trace import Trace, TraceWriter

_YARDSTICK, _NOISE_RUN, _CANDIDATE = "yardstick", "noise", "candidate"
_CALLED = "called"


class ModuleCall(NamedTuple):
    """A call whose operations one side of a check records."""

    check: GenerateCheck
    side: Literal["reference", "candidate"]
    site: CallSite
    separate: tuple[str, ...] = ()
    """Of the reference: the modules inside the call that the candidate calls and that have their own stages."""

    @property
    def folder(self) -> Path:
        """Return the folder of the side's traces."""
        return self.check.folder / f"operations-{self.side}"


_OPERATIONS: "RemoteFunction[ModuleCall, None]" = RemoteFunction(
    "assay.generate.find_operation:record_operations", PRELOAD
)


def find_operation(check: GenerateCheck, site: CallSite, progress: Progress) -> str | None:
    """Return the first wrong operation of the call at `site`; None if none exceeds its limit."""
    candidates = _record(ModuleCall(check, "candidate", site), progress)
    # Modules that the candidate never calls, such as a fused activation, belong to the stage of their caller.
    called: set[str] = set()
    for one in candidates:
        paths: Any = one.attachment_json(_CALLED)
        called |= {*paths}
    wanted = ModuleCall(check, "reference", site, tuple(sorted(called)))
    (trusted,) = _record(wanted, progress)
    yardstick, noise = (_read(trusted, part) for part in (_YARDSTICK, _NOISE_RUN))
    recorded = GoldenSection.open(check.golden_folder, check.dtype).steps.find(site)
    whole = put_together([_read(one, _CANDIDATE) for one in candidates], yardstick, noise)
    if whole is None:
        raise UsageError("the ranks run other operations than each other")
    wrong = find_wrong_operation(
        *whole,
        load_limits(check.limits),
        float_format(check.dtype).unit_roundoff,
        recorded.rows if recorded is not None else None,
    )
    return wrong.name if wrong is not None else None


def _record(wanted: ModuleCall, progress: Progress) -> list[Trace]:
    """Have one side record its operations. Returns: the traces by rank."""
    check, folder = wanted.check, wanted.folder
    mesh, python = (check.mesh, check.python) if wanted.side == "candidate" else ({}, None)
    world, name = world_of(mesh, check.candidate.device), folder.name
    call(
        _OPERATIONS,
        wanted,
        world=world,
        folder=check.folder,
        name=name,
        progress=progress,
        python=python,
    )
    num_ranks = prod(mesh.values())
    if num_ranks == 1:
        return [Trace.open(folder)]
    return [Trace.open(rank_folder(folder, number)) for number in range(num_ranks)]


def record_operations(wanted: ModuleCall, progress: Progress, rank: Rank | None = None) -> None:
    """Record the operations of one call on one side, or on one rank of the candidate.

    The trace goes to the folder of the side; with several ranks, to a folder for each rank there.
    """
    check = wanted.check
    section = GoldenSection.open(check.golden_folder, check.dtype)
    golden = section.golden
    work = shortened(section, wanted.site)
    num_tokens = count_tokens([work.batch])
    module = wanted.site.module
    folder = wanted.folder if rank is None else rank_folder(wanted.folder, rank.number)
    with TraceWriter(folder, {"module": module}) as writer:
        if wanted.side == "candidate":
            with progress.step(f"loading {check.model}"):
                side = load_candidate(check, golden, rank)
            with progress.task(f"recording operations of {module}", num_tokens, "tokens"):
                recorder = _operations(side, section, work, wanted.site, None)
            _store(writer, _CANDIDATE, recorder.operations)
            writer.attach_json(_CALLED, sorted(recorder.called))
            return
        choose_threads(golden.model.num_parameters)
        device = open_run(parse_run(golden.reference["run"]))
        wide = section.entry.yardstick_dtype
        allowed = allowed_memory(device, check.max_memory)
        widening = widening_within(golden.model.num_parameters, wide, allowed)

        def load(name: str) -> Side:
            if name == _NOISE_RUN:
                return Side(
                    load_reference(check.model, device, check.dtype, check.remote_code), device
                )
            loaded = load_yardstick(
                check.model, device, wide, check.dtype, check.remote_code, widening
            )
            return Side(loaded, device)

        for name in (_YARDSTICK, _NOISE_RUN):
            with progress.task(f"{name}: recording operations of {module}", num_tokens, "tokens"):
                recorder = _operations(load(name), section, work, wanted.site, wanted.separate)
            _store(writer, name, recorder.operations)


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
) -> OperationRecorder:
    """Run a side on the recorded inputs, and return the recorder of the call at `site`."""
    replayer = Replayer(
        section.steps, section.boundary, attention_of(side.loaded), source=work.source
    )
    replayer.layout = side.layout
    tracer = ModuleTracer(replayer)
    recorder = OperationRecorder(tracer, (site.module, site.step, 0), separate)
    numbers = [batch.number for batch in section.batches]
    tokens = section.tensors("tokens")[numbers.index(work.batch.number)]
    with tracer.attached(side.loaded.model):
        tracer.begin_batch(work.batch.number, timeline_of(work.batch))
        run_forced(side, work, tokens[:, : work.batch.max_new_tokens], recorder)
    return recorder


def _store(writer: TraceWriter, part: str, operations: list[Operation]) -> None:
    """Attach operations as JSON names and numbered tensors."""
    names = [[item.name, item.overload, str(len(item.outputs))] for item in operations]
    tensors = {
        f"{number}.{output}": tensor
        for number, item in enumerate(operations)
        for output, tensor in enumerate(item.outputs)
    }
    writer.attach_json(f"{part}-names", names)
    writer.attach(part, tensors)


def _read(trace: Trace, part: str) -> list[Operation]:
    """Read the operations of one part, as `_store` attached them."""
    names: Any = trace.attachment_json(f"{part}-names")
    tensors = trace.attachment(part)
    return [
        Operation(name, overload, tuple(tensors[f"{number}.{k}"] for k in range(int(count))))
        for number, (name, overload, count) in enumerate(names)
    ]
