"""Judges if a run under mixed precision keeps weights, moments and gradient sums in float32."""

from dataclasses import replace

from assay.comparing.levels import DiagnosedFault
from assay.comparing.results import ReplayResults
from assay.dtypes import FORMATS
from assay.errors import name_some
from assay.sites import Phase
from assay.training.judging.evidence import TrainEvidence
from assay.training.judging.places import UPDATE_PREFIX, location_of_parameter, parameter_name
from assay.training.protocol import PHASE_METHODS

# A sum of n numbers in float32 has an error of at most n - 1 roundings of its terms (Higham, Accuracy
# and Stability of Numerical Algorithms, 4.2), and so has the sum that it is compared with. As much
# again allows ranks to add in another order. In bfloat16 the error is 2**15 times as large.
_ROUNDINGS_OF_A_SUM = 4

# A larger error means that the sum lacks a part. The phase `backward` judges that.
_LARGEST_ROUNDING = 0.01


def noise_of_optimizer(evidence: TrainEvidence, in_dtype: ReplayResults) -> ReplayResults:
    """Return the noise for updates and moments: the noise run's, or that of an optimizer in float32.

    in_dtype: measurements of the noise run in the candidate's dtype. They apply to the updates of
        parameters that are rounded to that dtype from a wider copy.
    """
    kept = evidence.report.free.kept
    if kept is None:
        return in_dtype
    if evidence.measure_in_float32 is None:
        raise ValueError("mixed precision is judged by an optimizer in float32")
    in_float32 = evidence.measure_in_float32()
    copied = set(kept.copied)
    from_copies = {
        key: port
        for key, port in in_dtype.ports.items()
        if port.port.startswith(UPDATE_PREFIX) and parameter_name(*key) in copied
    }
    return replace(in_float32, ports=in_float32.ports | from_copies)


def find_broken_promise(evidence: TrainEvidence) -> DiagnosedFault | None:
    """Find values that a run under mixed precision keeps in less than float32."""
    kept = evidence.report.free.kept
    if kept is None:
        return None
    dtype, promise = evidence.dtype, "float32, which mixed precision promises"
    is_whole = len(kept.parameters) == evidence.reference.num_trainable
    unmoved = _describe_unmoved(evidence)
    for names, words in (
        (kept.parameters, f"trained parameters are kept in {dtype} without a copy in {promise}: {unmoved}"),
        (kept.moments, f"moments are kept in less than {promise}"),
        (kept.rounded, f"parameters in float32 are rounded to {dtype} between two steps"),
    ):  # fmt: skip
        if names:
            # The name of a moment follows that of its parameter.
            parameter = None if is_whole and names is kept.parameters else names[0].split(" ")[0]
            reason = f"{len(names)} {words}: {name_some(names)}"
            location = location_of_parameter("optimizer", parameter)
            return DiagnosedFault("optimizer-update", location, reason)
    return _find_rounded_sums(evidence)


def is_explained_by(phase: Phase, promise: DiagnosedFault) -> bool:
    """Return True if the first error, in `phase`, follows from a broken promise."""
    order = list(PHASE_METHODS)
    if phase not in order:
        return False
    of_promise = promise.location.phase
    return order.index(phase) > order.index(of_promise) or phase == of_promise == "optimizer"


def _find_rounded_sums(evidence: TrainEvidence) -> DiagnosedFault | None:
    gradients, micro_batches = evidence.report.gradients, evidence.options.micro_batches
    limit = _ROUNDINGS_OF_A_SUM * micro_batches * FORMATS["float32"].unit_roundoff
    errors = gradients.errors_of_sums
    rounded = sorted(n for n, error in errors.items() if limit < error <= _LARGEST_ROUNDING)
    # A float32 sum of several narrow values fits the narrow dtype only by chance; not all sums do.
    all_narrow = gradients.sharded_gradients == gradients.narrow_gradients > 0
    if not rounded and not (all_narrow and micro_batches > 1):
        return None
    names = f": {name_some(rounded)}" if rounded else ""
    reason = (
        f"gradients are added up in {evidence.dtype}, which mixed precision does in float32{names}"
    )
    whole = not rounded or len(rounded) == len(errors)
    location = location_of_parameter("backward", None if whole else rounded[0])
    return DiagnosedFault("module-error", location, reason)


def _describe_unmoved(evidence: TrainEvidence) -> str:
    moved = evidence.report.optimizer.moved
    share = 100 * (moved.num_expected - moved.num_moved) / max(moved.num_expected, 1)
    return f"updates leave {share:.1f}% of the weights where they are that the reference's move"
