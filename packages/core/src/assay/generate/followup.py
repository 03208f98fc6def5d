"""What is asked once a stage has failed: is it only another representation, and which operation?"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from assay.comparing.limits import load_limits
from assay.comparing.results import ReplayResults
from assay.dtypes import float_format
from assay.generate.check import GenerateCheck, Workers
from assay.generate.closer import read_operations
from assay.generate.equivalence import find_equivalent_stages
from assay.generate.golden import GoldenSection
from assay.generate.judging import Judgement
from assay.generate.requests import CandidateRequest, CloserRequest, EquivalenceRequest
from assay.locating.operations import find_wrong_operation
from assay.sites import CallSite
from assay.trace import Trace
from assay.verdicts import Outcome, overall_outcome

_TEXT_LEVELS = ("tokens", "logits", "sampler")
_NAMED = 5


def follow_up(
    judgement: Judgement, check: GenerateCheck, candidate: CandidateRequest, workers: Workers
) -> Judgement:
    """The judgement after a closer look."""
    levels = judgement.verdict.levels
    if check.setup is not None and all(
        levels[name].verdict in (None, Outcome.PASS) for name in _TEXT_LEVELS
    ):
        judgement = _excuse_representation(judgement, check, candidate, workers)
    if judgement.origin is None or judgement.call is None:
        return judgement
    operation = _find_operation(judgement, check, candidate, workers)
    if operation is None or judgement.verdict.location is None:
        return judgement
    location = judgement.verdict.location.model_copy(update={"op": operation})
    return replace(judgement, verdict=judgement.verdict.model_copy(update={"location": location}))


def _excuse_representation(
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
    if not found["agrees"]:
        return judgement
    results = Trace.open(candidate.folder)
    replay = ReplayResults.from_parts(
        results.attachment_json("replay"),  # type: ignore[arg-type]
        results.attachment("replay-sums"),
    )
    failed = {item.stage for item in judgement.ranked}
    if find_equivalent_stages(replay, found["stages"], failed) != failed:
        return judgement
    names = ", ".join(sorted(str(stage) for stage in failed)[:_NAMED])
    verdict = judgement.verdict
    levels: dict[str, Any] = dict(verdict.levels)
    for name in ("inputs", "modules"):
        if levels[name].verdict is Outcome.FAIL:
            update = {"verdict": Outcome.PASS, "reason": "only the representation differs"}
            levels[name] = levels[name].model_copy(update=update)
    outcome = overall_outcome([one.verdict for one in levels.values() if one.verdict is not None])
    note = (
        f"{len(failed)} stages hold other values than the reference ({names}), but computed exactly"
        " the model is the same: its logits agree in float64"
    )
    changed = verdict.model_copy(
        update={
            "verdict": outcome,
            "levels": levels,
            "location": None,
            "first_bad_token": None,
            "diagnosis": "representation-difference" if outcome is Outcome.PASS else None,
            "notes": [*verdict.notes, note],
        }
    )
    return replace(judgement, verdict=changed, origin=None)


def _find_operation(
    judgement: Judgement, check: GenerateCheck, candidate: CandidateRequest, workers: Workers
) -> str | None:
    """The first wrong operation of the stage that made the error, if one can be told."""
    batch, step = judgement.call or (0, 0)
    module = judgement.origin.stage.module if judgement.origin is not None else ""
    sides = {}
    for name, parts in (("reference", ("yardstick", "noise")), ("candidate", ("candidate",))):
        request = CloserRequest(
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
        workers.ask("closer", request.model_dump(), f"operations-{name}")
        trace = Trace.open(Path(request.folder))
        for part in parts:
            names = trace.attachment_json(f"{part}-names")
            sides[part] = read_operations(names, trace.attachment(part))  # type: ignore[arg-type]
    recorded = GoldenSection.open(Path(candidate.golden), check.dtype).trace.find(
        CallSite(step, module, micro_batch=batch)
    )
    wrong = find_wrong_operation(
        sides["candidate"],
        sides["yardstick"],
        sides["noise"],
        load_limits(check.limits),
        float_format(check.dtype).unit_roundoff,
        recorded.rows if recorded is not None else None,
    )
    return wrong.name if wrong is not None else None
