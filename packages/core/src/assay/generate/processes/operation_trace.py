"""Record the outputs of each operation in one module call."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.estimates.limits import allowed_memory
from assay.generate.passes.generation_loop import count_tokens, timeline_of
from assay.generate.passes.passes import Side, Work, run_forced, whole_batches
from assay.generate.processes.candidate_model import load_candidate
from assay.generate.processes.golden import load_reference, load_yardstick
from assay.generate.processes.golden_folder import GoldenSection, read_golden
from assay.generate.processes.requests import OperationsRequest
from assay.generate.processes.run_plan import widening_within
from assay.hooks.module_tracer import ModuleTracer
from assay.launch import Rank
from assay.locating.modules import Replayer
from assay.models import LoadedModel
from assay.models.loading.configs import attention_of
from assay.models.size import choose_threads
from assay.recording.operations import Operation, OperationRecorder
from assay.runs import Progress
from assay.runs.results import rank_folder
from assay.trace import Trace, TraceWriter

YARDSTICK, NOISE_RUN, CANDIDATE = "yardstick", "noise", "candidate"
# Runs of each side.
PARTS = {"reference": (YARDSTICK, NOISE_RUN), "candidate": (CANDIDATE,)}


def trace_operations(
    request: OperationsRequest, progress: Progress, rank: Rank | None = None
) -> None:
    """Record the operations of one call on one side, or on one rank of the candidate.

    The trace goes to `request.folder`; with several ranks, to a folder for each rank there.
    """
    candidate = request.candidate
    dtype, remote_code = candidate.candidate.dtype, candidate.remote_code
    golden = read_golden(Path(candidate.golden))
    section = GoldenSection.open(Path(candidate.golden), dtype)
    work = _shortened(section, request)
    num_tokens = count_tokens([work.batch])
    folder = Path(request.folder)
    if rank is not None:
        folder = rank_folder(folder, rank.number)
    with TraceWriter(folder, {"module": request.module}) as writer:
        if request.side == "candidate":
            with progress.step(f"loads {candidate.model}"):
                side = load_candidate(candidate, golden, rank)
            with progress.task(f"records operations of {request.module}", num_tokens, "tokens"):
                _record(side, section, work, request, writer, CANDIDATE)
            return
        choose_threads(golden.model.num_parameters)
        run = parse_run(golden.reference["run"])
        device = open_run(run)
        yardstick_dtype = golden.sections[dtype].yardstick_dtype
        allowed = allowed_memory(device, request.max_memory)
        widening = widening_within(golden.model.num_parameters, yardstick_dtype, allowed)

        def load(name: str) -> LoadedModel:
            if name == NOISE_RUN:
                return load_reference(candidate.model, device, dtype, remote_code)
            return load_yardstick(
                candidate.model, device, yardstick_dtype, dtype, remote_code, widening
            )

        for name in (YARDSTICK, NOISE_RUN):
            with progress.task(
                f"{name}: records operations of {request.module}", num_tokens, "tokens"
            ):
                _record(Side(load(name), device), section, work, request, writer, name)


def _shortened(section: GoldenSection, request: OperationsRequest) -> Work:
    """Return the batch of the call, without the steps after it."""
    work = next(
        (w for w in whole_batches(section.batches) if w.batch.number == request.batch), None
    )
    if work is None:
        raise UsageError(f"the golden has no batch {request.batch}")
    if not work.batch.max_new_tokens:
        return work
    steps = min(work.batch.max_new_tokens, request.step + 1)
    return Work(replace(work.batch, max_new_tokens=steps), work.source)


def _record(
    side: Side,
    section: GoldenSection,
    work: Work,
    request: OperationsRequest,
    writer: TraceWriter,
    name: str,
) -> None:
    replayer = Replayer(
        section.steps, section.boundary, attention_of(side.loaded), source=work.source
    )
    replayer.layout = side.layout
    tracer = ModuleTracer(replayer)
    recorder = OperationRecorder(tracer, (request.module, request.step, 0))
    tokens = section.tensors("tokens")[[b.number for b in section.batches].index(request.batch)]
    with tracer.attached(side.loaded.model):
        tracer.begin_batch(work.batch.number, timeline_of(work.batch))
        run_forced(side, work, tokens[:, : work.batch.max_new_tokens], recorder)
    _store_operations(writer, name, recorder.operations)


def _store_operations(writer: TraceWriter, part: str, operations: list[Operation]) -> None:
    """Attach operations as JSON names and numbered tensors."""
    names = [[item.name, item.overload, str(len(item.outputs))] for item in operations]
    tensors = {
        f"{number}.{output}": tensor
        for number, item in enumerate(operations)
        for output, tensor in enumerate(item.outputs)
    }
    writer.attach_json(f"{part}-names", names)
    writer.attach(part, tensors)


def read_operations(trace: Trace, part: str) -> list[Operation]:
    """Read the operations that `trace_operations` recorded for one of `PARTS`."""
    names: Any = trace.attachment_json(f"{part}-names")
    tensors = trace.attachment(part)
    return [
        Operation(name, overload, tuple(tensors[f"{number}.{k}"] for k in range(int(count))))
        for number, (name, overload, count) in enumerate(names)
    ]
