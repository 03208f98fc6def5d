"""What is trained moved, and nothing else did."""

from assay.comparing.levels import Finding
from assay.errors import name_some
from assay.verdicts import Location
from assay_smoke.cases.judging.evidence import CaseEvidence

_PREFIX = "model."


def judge_movement(evidence: CaseEvidence) -> tuple[int, Finding | None]:
    """How many parameters and buffers were held to it, and what is wrong with one of them."""
    trainable = {row.parameter for row in evidence.reference.training.noise_trajectory}
    before: dict[str, str] = {}
    after: dict[str, str] = {}
    for rank in evidence.trained:
        before |= {name.removeprefix(_PREFIX): digest for name, digest in rank.before.items()}
        after |= {name.removeprefix(_PREFIX): digest for name, digest in rank.after.items()}
    moved = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    still, unexpected = sorted(trainable - moved), sorted(moved - trainable)
    if still:
        reason = (
            f"{len(still)} of {len(trainable)} trained parameters never moved: {name_some(still)}"
        )
        return len(before), Finding("frozen-parameters", _at(still), reason)
    if unexpected:
        reason = f"{len(unexpected)} frozen parameters or buffers moved: {name_some(unexpected)}"
        return len(before), Finding("optimizer-update", _at(unexpected), reason)
    return len(before), None


def _at(names: list[str]) -> Location:
    module = names[0].rpartition(".")[0]
    return Location(phase="optimizer", module=module, parameter=names[0])
