"""What is asked once a stage has failed: is it only another representation, and which operation?"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.comparing.judge import Judged
from assay.comparing.levels import outcome_of_levels
from assay.comparing.limits import load_limits
from assay.comparing.loaded import JudgedLoad
from assay.dtypes import float_format
from assay.errors import AssayError
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
from assay.generate.processes.requests import (
    CandidateRequest,
    EquivalenceRequest,
    GenerateCheck,
    OperationsRequest,
)
from assay.generate.processes.workers import Workers
from assay.locating.operations import find_wrong_operation
from assay.sites import CallSite
from assay.trace import Trace
from assay.verdicts import Outcome

if TYPE_CHECKING:
    from assay.recording.operations import Operation

_TEXT_LEVELS = ("tokens", "logits", "sampler")
_NAMED = 5


def follow_up(
    judgement: Judgement, check: GenerateCheck, candidate: CandidateRequest, workers: Workers
) -> Judgement:
    """The judgement after a closer look; where that is not possible, as it was, with a note."""
    levels = judgement.verdict.levels
    if check.setup is not None and all(
        levels[name].verdict in (None, Outcome.PASS) for name in _TEXT_LEVELS
    ):
        try:
            judgement = _pass_if_representation(judgement, check, candidate, workers)
        except AssayError as error:
            judgement = _with_note(judgement, f"not run in float64: {error}")
    if judgement.origin is None or judgement.call is None:
        return judgement
    try:
        operation = _find_operation(judgement, check, candidate, workers)
    except AssayError as error:
        # A golden from elsewhere: its device need not be here.
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
    judgement: Judgement, check: GenerateCheck, candidate: CandidateRequest, workers: Workers
) -> Judgement:
    request = EquivalenceRequest(
        model=check.model,
        golden=candidate.golden,
        dtype=check.dtype,
        setup=check.setup,
        options=check.options,
        remote_code=check.remote_code,
    )
    found = workers.ask("equivalence", request.model_dump(), "equivalence").result
    if not found["agrees"] or not is_representation(judgement.failed, found["stages"]):
        return judgement
    if judgement.load is not None and not _are_tried(judgement.load, judgement.failed):
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
        f"{len(stages)} stages hold other values than the reference ({', '.join(stages[:_NAMED])}),"
        " but computed exactly the model is the same: its logits agree in float64"
    )
    return _with_note(replace(judgement, verdict=changed, origin=None), note)


def _are_tried(load: JudgedLoad, failed: list[Judged]) -> bool:
    """Whether the inputs reached all that is wrong with the weights.

    Then the agreement of the logits speaks of it. The stage of a weight that was changed has to show
    the change; of a table that is looked up in, it shows the rows of the tokens that were used.
    """
    shown = {item.port.stage.module for item in failed if not item.port.kind.endswith("Embedding")}
    return not load.loading and all(finding.location.module in shown for finding in load.changed)


def _find_operation(
    judgement: Judgement, check: GenerateCheck, candidate: CandidateRequest, workers: Workers
) -> str | None:
    """The first wrong operation of the stage that made the error; None if none is over its limit."""
    batch, step = judgement.call or (0, 0)
    module = judgement.origin.stage.module if judgement.origin is not None else ""
    sides: dict[str, list[Operation]] = {}
    for name, parts in PARTS.items():
        request = OperationsRequest(
            model=check.model,
            golden=candidate.golden,
            dtype=check.dtype,
            folder=str(workers.folder / f"operations-{name}"),
            module=module,
            batch=batch,
            step=step,
            candidate=candidate if name == "candidate" else None,
            remote_code=check.remote_code,
        )
        workers.ask("operations", request.model_dump(), f"operations-{name}")
        trace = Trace.open(Path(request.folder))
        sides |= {part: read_operations(trace, part) for part in parts}
    recorded = GoldenSection.open(Path(candidate.golden), check.dtype).trace.find(
        CallSite(step, module, micro_batch=batch)
    )
    wrong = find_wrong_operation(
        sides[CANDIDATE],
        sides[YARDSTICK],
        sides[NOISE_RUN],
        load_limits(check.limits),
        float_format(check.dtype).unit_roundoff,
        recorded.rows if recorded is not None else None,
    )
    return wrong.name if wrong is not None else None
