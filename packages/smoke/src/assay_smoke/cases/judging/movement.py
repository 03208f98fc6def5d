"""Judges which parameters training changed."""

from assay.comparing.levels import DiagnosedFault, LevelResult
from assay.errors import name_some
from assay.verdicts import Level, Location, Outcome
from assay_smoke.cases.judging.evidence import CaseEvidence

_PREFIX = "model."


def judge_movement(evidence: CaseEvidence) -> tuple[LevelResult, DiagnosedFault | None]:
    """Compare hashes of every parameter and buffer before the first and after the last step."""
    before: dict[str, str] = {}
    after: dict[str, str] = {}
    for rank in evidence.trained:
        before |= {name.removeprefix(_PREFIX): digest for name, digest in rank.before.items()}
        after |= {name.removeprefix(_PREFIX): digest for name, digest in rank.after.items()}
    moved = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    trainable = {row.parameter for row in evidence.reference.training.noise_trajectory}
    for names in evidence.reference.training.shared:
        trainable |= set(names) if trainable & set(names) else set()
    expected = trainable & set(evidence.reference.moved) & before.keys()
    still, unexpected = sorted(expected - moved), sorted(moved - trainable)
    if still:
        shown = name_some(still)
        reason = f"{len(still)} of {len(expected)} trained parameters never moved: {shown}"
        return _failed(len(before), DiagnosedFault("frozen-parameters", _at(still), reason))
    if unexpected:
        reason = f"{len(unexpected)} frozen parameters or buffers moved: {name_some(unexpected)}"
        return _failed(len(before), DiagnosedFault("optimizer-update", _at(unexpected), reason))
    if not expected:
        reason = "the noise run changes no parameter of this run"
        return LevelResult(Level(verdict=Outcome.NOT_COMPARED, reason=reason)), None
    return LevelResult(Level(verdict=Outcome.PASS, compared=len(before))), None


def _failed(compared: int, finding: DiagnosedFault) -> tuple[LevelResult, DiagnosedFault]:
    level = Level(verdict=Outcome.FAIL, reason=finding.reason, compared=compared)
    return LevelResult(level), finding


def _at(names: list[str]) -> Location:
    module = names[0].rpartition(".")[0]
    return Location(phase="optimizer", module=module, parameter=names[0])
