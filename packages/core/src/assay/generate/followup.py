"""The follow-up of a failed stage: test for a mere change of representation, find the operation."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.comparing.judge import Judged
from assay.comparing.levels import outcome_of_levels
from assay.comparing.limits import load_limits
from assay.comparing.loaded import JudgedLoad
from assay.comparing.wording.numerals import format_count
from assay.dtypes import float_format
from assay.errors import AssayError, UsageError, name_some
from assay.generate.judging.verdict import Judgement
from assay.generate.processes.equivalence import is_representation
from assay.generate.processes.golden_folder import GoldenSection
from assay.generate.processes.operation_trace import (
    CANDIDATE,
    NOISE_RUN,
    PARTS,
    YARDSTICK,
    read_operations,
)
from assay.generate.processes.remote_functions import (
    EQUIVALENCE,
    OPERATIONS,
    RECORDED_EQUIVALENCE,
)
from assay.generate.processes.requests import (
    CandidateRequest,
    EquivalenceRequest,
    GenerateCheck,
    OperationsRequest,
)
from assay.launch import call, world_of
from assay.locating.operations import find_wrong_operation
from assay.locating.rank_operations import put_together
from assay.runs import Progress
from assay.runs.results import EQUIVALENCE_FOLDER, rank_folder
from assay.sites import CallSite
from assay.trace import Trace
from assay.verdicts import Outcome

if TYPE_CHECKING:
    from assay.recording.operations import Operation

_TEXT_LEVELS = ("tokens", "logits", "sampler")


def follow_up(
    judgement: Judgement,
    check: GenerateCheck,
    candidate: CandidateRequest,
    folder: Path,
    progress: Progress,
) -> Judgement:
    """Return the judgement after the follow-up, or with a note if the follow-up cannot run.

    folder: for the files of the processes.
    """
    levels = judgement.verdict.levels
    same_text = all(levels[name].verdict in (None, Outcome.PASS) for name in _TEXT_LEVELS)
    # It needs the whole model in one process.
    if check.setup is not None and check.num_ranks == 1 and same_text:
        try:
            judgement = _pass_if_representation(judgement, check, candidate, folder, progress)
        except AssayError as error:
            judgement = _with_note(judgement, f"not run in float64: {error}")
    if judgement.origin is None or judgement.call is None:
        return judgement
    module = judgement.origin.stage.module
    try:
        operation = _find_operation(module, judgement.call, check, candidate, folder, progress)
    except AssayError as error:
        # This machine may lack the device of a golden from elsewhere.
        return _with_note(judgement, f"no operation is named: {error}")
    if operation is None or judgement.verdict.location is None:
        return judgement
    known = judgement.verdict.location
    location = known.model_copy(update={"op": operation})
    suspects = [
        one.model_copy(update={"location": location}) if one.location == known else one
        for one in judgement.verdict.suspects
    ]
    update = {"location": location, "suspects": suspects}
    return replace(judgement, verdict=judgement.verdict.model_copy(update=update))


def _with_note(judgement: Judgement, note: str) -> Judgement:
    verdict = judgement.verdict
    update = {"notes": [*verdict.notes, note]}
    return replace(judgement, verdict=verdict.model_copy(update=update))


def _pass_if_representation(
    judgement: Judgement,
    check: GenerateCheck,
    candidate: CandidateRequest,
    folder: Path,
    progress: Progress,
) -> Judgement:
    ports = [item.port for item in judgement.failed]
    request = EquivalenceRequest(
        candidate=candidate,
        folder=str(folder / EQUIVALENCE_FOLDER),
        ports=sorted({(p.stage.module, p.module, p.port) for p in ports}),
        max_memory=check.max_memory,
    )
    name = EQUIVALENCE_FOLDER
    (is_recorded,) = call(
        RECORDED_EQUIVALENCE, request, folder=folder, name=name, progress=progress
    )
    if not is_recorded:
        return judgement
    # A setup function may patch torch in its own process: the trusted one decides.
    name = "equivalence-reference"
    (found,) = call(EQUIVALENCE, request, folder=folder, name=name, progress=progress)
    if not is_representation(judgement.failed, found):
        return judgement
    if judgement.load is not None and not _is_load_tested(judgement.load, judgement.failed):
        return judgement
    stages = sorted({str(item.port.stage) for item in judgement.failed})
    levels: dict[str, Any] = dict(judgement.verdict.levels)
    for name in ("load", "inputs", "modules"):
        if levels[name].verdict is Outcome.FAIL:
            update = {"verdict": Outcome.PASS, "reason": "only the representation differs"}
            levels[name] = levels[name].model_copy(update=update)
    outcome = outcome_of_levels(levels, judgement.verdict.coverage)
    changed = judgement.verdict.model_copy(
        update={
            "verdict": outcome,
            "levels": levels,
            "location": None,
            "first_bad_token": None,
            "suspects": [],
            "noise_ratio": None,
            "limit": None,
            "statistic": None,
            "diagnosis": "representation-difference" if outcome is Outcome.PASS else None,
        }
    )
    note = (
        f"the values inside of {format_count(len(stages), 'stage')} differ from the reference's"
        f" ({name_some(stages)}), but the logits agree in float64: only their representation differs"
    )
    return _with_note(replace(judgement, verdict=changed, origin=None), note)


def _is_load_tested(load: JudgedLoad, failed: list[Judged]) -> bool:
    """Return True if the inputs reach every wrong weight, so that equal logits vindicate it.

    The stage of each changed weight must have failed. An embedding does not count: only the rows of
    the used tokens are tested.
    """
    shown = {item.port.stage.module for item in failed if not item.port.kind.endswith("Embedding")}
    return not load.loading and all(finding.location.module in shown for finding in load.changed)


def _find_operation(
    module: str,
    batch_and_step: tuple[int, int],
    check: GenerateCheck,
    candidate: CandidateRequest,
    folder: Path,
    progress: Progress,
) -> str | None:
    """Return the first wrong operation of `module`; None if no operation exceeds its limit."""
    batch, step = batch_and_step
    sides: dict[str, list[list[Operation]]] = {}
    for name, parts in PARTS.items():
        request = OperationsRequest(
            candidate=candidate,
            side=name,
            folder=str(folder / f"operations-{name}"),
            module=module,
            batch=batch,
            step=step,
            max_memory=check.max_memory,
        )
        mesh = candidate.mesh if name == "candidate" else {}
        call(
            OPERATIONS,
            request,
            world=world_of(mesh, check.candidate.device),
            folder=folder,
            name=f"operations-{name}",
            progress=progress,
        )
        traces = [Trace.open(one) for one in _folders(Path(request.folder), prod(mesh.values()))]
        sides |= {part: [read_operations(one, part) for one in traces] for part in parts}
    recorded = GoldenSection.open(Path(candidate.golden), check.dtype).steps.find(
        CallSite(step, module, micro_batch=batch)
    )
    (yardstick,), (noise,) = sides[YARDSTICK], sides[NOISE_RUN]
    whole = put_together(sides[CANDIDATE], yardstick, noise)
    if whole is None:
        raise UsageError("the ranks run other operations than each other")
    wrong = find_wrong_operation(
        *whole,
        load_limits(check.limits),
        float_format(check.dtype).unit_roundoff,
        recorded.rows if recorded is not None else None,
    )
    return wrong.name if wrong is not None else None


def _folders(folder: Path, num_ranks: int) -> list[Path]:
    """Return the folders of a side's traces."""
    return [folder] if num_ranks == 1 else [rank_folder(folder, n) for n in range(num_ranks)]
