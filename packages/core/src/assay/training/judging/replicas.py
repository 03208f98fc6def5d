"""Judges values that ranks hold in common, and how ranks share micro-batches and dropout masks."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from assay.comparing.levels import DiagnosedFault, LevelResult, failed, not_run, passed
from assay.errors import name_some
from assay.training.judging.evidence import FreeEvidence
from assay.training.processes.trainer_report import TrainerReport
from assay.training.state.records import HeldPart
from assay.verdicts import Location


def judge_replicas(evidence: FreeEvidence) -> tuple[LevelResult, DiagnosedFault | None]:
    """Judge if ranks that hold the same part of a value hold bitwise equal numbers."""
    if not evidence.on_ranks:
        return not_run("one process has no replicas"), None
    held = [report.free.held for report in evidence.reports]
    compared = 0
    for step in range(min(map(len, held))):
        at_step = [dict(rank[step]) for rank in held]
        copies = Counter(part for rank in at_step for part in rank)
        compared += sum(count > 1 for count in copies.values())
        diverged = _diverged(at_step)
        if diverged:
            names = sorted({part.parameter for part in diverged})
            reason = (
                f"after step {step} {len(names)} parameters or their moments differ between ranks"
                f" that hold the same part of them: {name_some(names)}"
            )
            part = min(diverged, key=str)
            location = Location(
                phase="optimizer",
                step=step,
                rank=diverged[part],
                module=part.parameter.rpartition(".")[0],
                parameter=part.parameter,
            )
            fault = DiagnosedFault("replica-divergence", location)
            return failed(compared, reason, fault.diagnosis, fault.location), fault
    if not compared:
        return not_run("no rank holds what another one holds"), None
    return passed(compared), None


def find_unshared(evidence: FreeEvidence) -> str | None:
    """Describe micro-batches that were not trained exactly once; None if there are none."""
    if not evidence.on_ranks:
        return None
    options = evidence.options
    micro_batches_run: Counter[tuple[int, int]] = Counter()
    for coordinate, reports in _by_data_rank(evidence.reports).items():
        first = reports[0].replay
        for report in reports:
            if sorted(report.replay.micro_batches_run) != sorted(first.micro_batches_run):
                return f"ranks with dp={coordinate} train on different micro-batches"
        micro_batches_run.update(first.micro_batches_run)
    for step in range(options.steps):
        for number in range(options.micro_batches):
            count = micro_batches_run[step, number]
            if count != 1:
                how = "by no rank" if not count else f"{count} times"
                return f"micro-batch {number} of step {step} was trained {how}"
    return None


def find_wrong_masks(evidence: FreeEvidence) -> DiagnosedFault | None:
    """Find dropout masks that are drawn twice, or equal on ranks that declare different masks."""
    for rank, report in enumerate(evidence.reports):
        if len(set(report.free.masks)) < len(report.free.masks):
            reason = "two micro-batches drop by the same random numbers"
            return DiagnosedFault("rng-state", Location(phase="forward", rank=rank), reason)
    alike = _ranks_that_drop_alike(evidence)
    if alike is None or evidence.reports[0].traits.dropout_masks != "own":
        return None
    reason = f"{_drop_alike(alike)}, and the trainer declares that each draws its own"
    return DiagnosedFault("rng-state", Location(phase="forward", rank=alike[1].rank), reason)


def notes_on_masks(evidence: FreeEvidence) -> list[str]:
    """Note undeclared equal masks on ranks of dp, or that no mask was seen."""
    if evidence.reference.draws and not any(report.free.masks for report in evidence.reports):
        return ["masks of dropout are not compared: none is drawn by torch's own functions"]
    alike = _ranks_that_drop_alike(evidence)
    if alike is None or evidence.reports[0].traits.dropout_masks is not None:
        return []
    declare = 'TrainerTraits(dropout_masks="shared"), else "own", which makes it a failure'
    return [f"{_drop_alike(alike)}: where this is meant, declare {declare}"]


class _DataRank(NamedTuple):
    """A rank and its place on the axis dp."""

    rank: int
    place: int


def _ranks_that_drop_alike(evidence: FreeEvidence) -> tuple[_DataRank, _DataRank] | None:
    """Find the first two ranks of different places on dp with a mask in common."""
    first: dict[str, _DataRank] = {}
    for rank, report in enumerate(evidence.reports):
        own = _DataRank(rank, report.coordinates.get("dp", 0))
        for mask in report.free.masks:
            if first.setdefault(mask, own).place != own.place:
                return first[mask], own
    return None


def _drop_alike(ranks: tuple[_DataRank, _DataRank]) -> str:
    return f"dp={ranks[0].place} and dp={ranks[1].place} drop by the same random numbers"


def _by_data_rank(reports: Sequence[TrainerReport]) -> dict[int, list[TrainerReport]]:
    """Group the ranks that train on the same micro-batches, by their place on the axis dp."""
    groups: dict[int, list[TrainerReport]] = {}
    for report in reports:
        groups.setdefault(report.coordinates.get("dp", 0), []).append(report)
    return groups


def _diverged(ranks: Sequence[Mapping[HeldPart, str]]) -> dict[HeldPart, int]:
    """Return parts whose hash differs from the first rank's, each with a rank where it differs."""
    first: dict[HeldPart, str] = {}
    wrong: dict[HeldPart, int] = {}
    for number, rank in enumerate(ranks):
        for part, digest in rank.items():
            if first.setdefault(part, digest) != digest:
                wrong.setdefault(part, number)
    return wrong
