"""Whether a run under mixed precision keeps in float32 what it promises to."""

from dataclasses import replace

from assay.comparing.levels import Finding
from assay.comparing.results import ReplayResults
from assay.comparing.stored_results import read_results
from assay.dtypes import FORMATS
from assay.errors import name_some
from assay.sites import Phase
from assay.training.judging.evidence import TrainEvidence
from assay.training.processes.golden import OPTIMIZER_IN_FLOAT32
from assay.training.protocol import PHASE_METHODS
from assay.verdicts import Location

# A sum of n numbers in float32 is off by at most n - 1 roundings of what was summed (Higham, Accuracy
# and Stability of Numerical Algorithms, 4.2), and so is the sum that it is compared with; as much
# again is left to ranks that add up in another order. In bfloat16 it is off by 2**15 times as much.
_ROUNDINGS_OF_A_SUM = 4

# Beyond it a sum lacks a part, as the phase `backward` is judged by itself.
_LARGEST_ROUNDING = 0.01


def promises_float32(evidence: TrainEvidence) -> bool:
    """Whether the run computes in less than float32, and keeps what it trains in float32."""
    return evidence.report.free.kept is not None


def noise_of_optimizer(evidence: TrainEvidence, in_dtype: ReplayResults) -> ReplayResults:
    """What updates and moments are held to: the noise run's, or that of an optimizer in float32.

    in_dtype: what the noise run measured in the candidate's dtype. It decides for the updates of
        parameters that are rounded to that dtype from a wider copy.
    """
    kept = evidence.report.free.kept
    if kept is None:
        return in_dtype
    in_float32 = read_results(evidence.noise, OPTIMIZER_IN_FLOAT32)
    copied = set(kept.copied)
    from_copies = {
        key: port
        for key, port in in_dtype.ports.items()
        if port.port.startswith("update.") and _parameter(*key) in copied
    }
    return replace(in_float32, ports=in_float32.ports | from_copies)


def find_broken_promise(evidence: TrainEvidence) -> Finding | None:
    """What a run under mixed precision keeps in less than float32; None without that promise."""
    kept = evidence.report.free.kept
    if kept is None:
        return None
    dtype = evidence.dtype
    if kept.parameters:
        whole = len(kept.parameters) == evidence.reference.num_trainable
        reason = (
            f"{len(kept.parameters)} trained parameters are kept in {dtype} without a copy in"
            f" float32, which mixed precision promises: {_describe_unmoved(evidence)}:"
            f" {name_some(kept.parameters)}"
        )
        return _of_optimizer(None if whole else kept.parameters[0], reason)
    if kept.moments:
        reason = (
            f"{len(kept.moments)} moments are kept in less than float32, which mixed precision"
            f" promises: {name_some(kept.moments)}"
        )
        return _of_optimizer(kept.moments[0].rpartition(" ")[0], reason)
    if kept.rounded:
        reason = (
            f"{len(kept.rounded)} parameters in float32 are rounded to {dtype} between two steps:"
            f" {name_some(kept.rounded)}"
        )
        return _of_optimizer(kept.rounded[0], reason)
    return _find_rounded_sums(evidence)


def is_explained_by(phase: Phase, promise: Finding) -> bool:
    """Whether what fails first, in `phase`, follows from a broken promise."""
    order = list(PHASE_METHODS)
    if phase not in order:
        return False
    of_promise = promise.location.phase
    return order.index(phase) > order.index(of_promise) or phase == of_promise == "optimizer"


def _find_rounded_sums(evidence: TrainEvidence) -> Finding | None:
    report = evidence.report
    unit = FORMATS["float32"].unit_roundoff
    limit = _ROUNDINGS_OF_A_SUM * evidence.options.micro_batches * unit
    rounded = sorted(
        name for name, error in report.errors_of_sums.items() if limit < error <= _LARGEST_ROUNDING
    )
    # A sum of several values in a narrow dtype fits the dtype by chance, and not all sums do.
    sharded = report.sharded_gradients and report.sharded_gradients == report.narrow_gradients
    if not rounded and not (sharded and evidence.options.micro_batches > 1):
        return None
    names = f": {name_some(rounded)}" if rounded else ""
    reason = (
        f"gradients are added up in {evidence.dtype}, which mixed precision does in float32{names}"
    )
    whole = not rounded or len(rounded) == len(report.errors_of_sums)
    name = None if whole else rounded[0]
    return Finding("module-error", _location("backward", name), reason)


def _of_optimizer(parameter: str | None, reason: str) -> Finding:
    return Finding("optimizer-update", _location("optimizer", parameter), reason)


def _location(phase: Phase, parameter: str | None) -> Location:
    module = parameter.rpartition(".")[0] if parameter is not None else None
    return Location(phase=phase, module=module, parameter=parameter)


def _describe_unmoved(evidence: TrainEvidence) -> str:
    report = evidence.report
    unmoved = report.updates_expected - report.updates_made
    share = 100 * unmoved / max(report.updates_expected, 1)
    return f"updates leave {share:.1f}% of the weights where they are that the reference's move"


def _parameter(module: str, port: str) -> str:
    short = port.partition(".")[2]
    return f"{module}.{short}" if module else short
