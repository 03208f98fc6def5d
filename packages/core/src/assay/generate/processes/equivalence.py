"""Test for a difference of representation: other intermediate values, the same model.

For example, shifting all positions changes queries and keys but no logit. In exact arithmetic the
stages of such a model still differ, and its logits agree. A precision error vanishes there. So the
candidate's code runs again in float64 on the host.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from assay.comparing.judge import Judged
from assay.comparing.results import ReplayResults
from assay.devices.registry import open_device
from assay.errors import MachineError
from assay.estimates.limits import allowed_memory
from assay.generate.passes.generation_loop import count_tokens
from assay.generate.passes.passes import Side, replay, run_forced, whole_batches
from assay.generate.processes.candidate import set_up
from assay.generate.processes.estimates.needs import BASE_BYTES
from assay.generate.processes.fitting_golden import check_same_model
from assay.generate.processes.golden_folder import GoldenSection, read_golden
from assay.generate.processes.options import CandidateOptions
from assay.generate.processes.requests import EquivalenceRequest
from assay.locating.modules import Replayer
from assay.models import load_model
from assay.models.loading.configs import attention_of
from assay.models.size import choose_threads
from assay.progress import format_size
from assay.runs import Progress

# Two float64 computations of the same logits differ by rounding: by 4e-16 on the micro models with
# shifted positions or permuted hidden units. This limit allows a hundred times that for depth and
# other orders of sums. A wrong scale that the next norm cancels is an error: the norm's epsilon
# shows it, by 5e-11 for 0.1 % and 4e-9 for 2 % before a norm of micro:gemma2.
EXACT_AGREEMENT = 1e-13

# A stage with at least this share of its error in float64 computes other values; its precision is
# not the cause.
SAME_ERROR = 0.5


@dataclass(frozen=True, slots=True)
class PortDifference:
    """The error of a port in float64."""

    relative_error: float
    num_different: int
    """Number of different elements of values that must be equal."""


@dataclass(frozen=True, slots=True)
class Equivalence:
    """The candidate's code in float64 against the golden."""

    agrees: bool
    """True if the logits agree."""
    errors: Mapping[tuple[str, str], PortDifference] = field(default_factory=dict)
    """Errors by module and port, if the logits agree."""


def run_equivalence(request: EquivalenceRequest, progress: Progress) -> Equivalence:
    """Run the candidate's code in float64 on the host: logits first, stages if they agree.

    Raises: MachineError if the model in float64 does not fit into memory.
    """
    golden, device = read_golden(Path(request.golden)), open_device("cpu")
    if golden.sections[request.dtype].yardstick_dtype != "float64":
        return Equivalence(agrees=False)  # no such logits agree to 1e-13
    needed = 8 * golden.model.num_parameters + BASE_BYTES
    available = allowed_memory(device, request.max_memory)
    if needed > available:
        raise MachineError(
            f"the model in float64 needs about {format_size(needed)} of memory, and only"
            f" {format_size(available)} is free or allowed by --memory"
        )
    section = GoldenSection.open(Path(request.golden), request.dtype)
    options = CandidateOptions.parse(request.options)
    choose_threads(golden.model.num_parameters)
    num_tokens = count_tokens(section.batches)
    # Two runs; the second only if the logits of the first agree.
    with progress.task("runs the candidate's code in float64", 2 * num_tokens, "tokens"):
        loaded = load_model(
            request.model,
            dtype="float64",
            attention=options.attention,
            experts=options.experts,
            rounded_to=request.dtype,
            remote_code=request.remote_code,
        )
        check_same_model(golden, loaded)
        side = set_up(Side(loaded, device), request.setup)
        works, tokens = whole_batches(section.batches), section.tensors("tokens")
        logits = section.tensors("logits")
        allowed = EXACT_AGREEMENT**2 * sum(float(one.double().pow(2).sum()) for one in logits)
        difference = 0.0
        for work, forced, expected in zip(works, tokens, logits, strict=True):
            actual = run_forced(side, work, forced).logits.double()
            difference += float((actual - expected.double()).pow(2).sum())
            # Written so that NaN is a difference. It only grows: the other batches cannot undo it.
            if not difference <= allowed:
                return Equivalence(agrees=False)
        replayer = Replayer(section.steps, section.boundary, attention_of(side.loaded))
        results = replay(side, works, tokens, replayer)
    return Equivalence(agrees=True, errors=_errors(results))


def _errors(results: ReplayResults) -> dict[tuple[str, str], PortDifference]:
    return {
        (port.module, port.port): PortDifference(port.sums.relative_error, port.exact.num_different)
        for port in results.ports.values()
        if port.sums.relative_error > 0 or port.exact.num_different
    }


def is_representation(failed: Iterable[Judged], found: Equivalence) -> bool:
    """Return True if the logits agree, and every failed statistic differs as much in float64."""
    return found.agrees and all(
        _differs_as_much(item, found.errors.get((item.port.module, item.port.port)))
        for item in failed
    )


def _differs_as_much(failed: Judged, in_float64: PortDifference | None) -> bool:
    if in_float64 is None or failed.ratio.statistic == "non-finite":
        return False
    if failed.ratio.statistic == "exact":
        return bool(in_float64.num_different)
    return in_float64.relative_error >= SAME_ERROR * failed.port.sums.relative_error
