"""Test for a difference of representation: other intermediate values, the same model.

For example, shifting all positions changes queries and keys but no logit. In exact arithmetic the
stages of such a model still differ, and its logits agree. A precision error vanishes there. So the
candidate's code runs again in float64 on the host.

That run only records: a setup function may have patched torch there. The trusted process puts the
recorded weights and values into the yardstick, and computes logits and errors itself.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from assay.devices.base import Device
from assay.devices.registry import open_device
from assay.errors import MachineError, name_some
from assay.estimates import allowed_memory
from assay.generate.candidate import check_same_model, set_up
from assay.generate.capture import load_yardstick
from assay.generate.generation_loop import count_tokens
from assay.generate.golden import GoldenSection
from assay.generate.judging import Judgement
from assay.generate.passes import Side, replay, run_forced, watched, whole_batches
from assay.generate.run_plan import BASE_BYTES
from assay.generate.spec import PRELOAD, CandidateOptions, GenerateCheck
from assay.hooks.coverage_watch import UsageWatch
from assay.hooks.module_tracer import ActiveCall, NullHandler, TraceHandler
from assay.hooks.tensors import replace_tensors
from assay.judge.levels import outcome_of_levels
from assay.judge.loaded import JudgedLoad
from assay.judge.replays import Judged
from assay.judge.results import ReplayResults
from assay.judge.wording import format_count
from assay.launch import RemoteFunction, call
from assay.models import load_model, weight_hashes
from assay.models.config_files import attention_of
from assay.models.load import choose_threads
from assay.progress import format_size
from assay.replay.modules import Replayer
from assay.runs import Progress
from assay.runs.results import EQUIVALENCE_FOLDER
from assay.sites import Call, CallSite, unwrapped_path
from assay.statistics import OF_INTEGERS
from assay.trace import TensorEntry, Trace, TraceWriter
from assay.verdicts import Outcome

# Two float64 computations of the same logits differ by rounding: by 4e-16 on the micro models with
# shifted positions or permuted hidden units. This limit allows a hundred times that for depth and
# other orders of sums. A wrong scale that the next norm cancels is an error: the norm's epsilon
# shows it, by 5e-11 for 0.1 % and 4e-9 for 2 % before a norm of micro:gemma2.
EXACT_AGREEMENT = 1e-13

# A stage whose error in float64 is within this factor of the observed one computes other values; its
# precision is not the cause.
SAME_ERROR = 2.0

_WEIGHTS = "weights"


class FailedPorts(NamedTuple):
    """The values that failed in a check."""

    check: GenerateCheck
    ports: Sequence[tuple[str, str, str]]
    """Stage, module and port of each."""


class PortDifference(NamedTuple):
    """The error of a port in float64."""

    relative_error: float
    num_different: int
    """Number of different elements of values that must be equal."""


Differences = dict[tuple[str, str], PortDifference]
"""Errors by module and port."""
Equivalence = Differences | None
"""Of the yardstick with the candidate's weights and values, against the golden; None if the logits differ or prove nothing."""

_RECORDING: RemoteFunction[FailedPorts, bool] = RemoteFunction(
    "assay.generate.float64_rerun:record_equivalence", PRELOAD
)
_VERIFICATION: "RemoteFunction[FailedPorts, Equivalence]" = RemoteFunction(
    "assay.generate.float64_rerun:verify_equivalence", PRELOAD
)

Visit = Callable[[CallSite, str, Tensor], Tensor]


@dataclass
class _Ports:
    """A handler that passes the values at all ports to `visit`, and what it returns to `handler`."""

    visit: Visit
    handler: TraceHandler = field(default_factory=NullHandler)

    def enter(self, active: ActiveCall) -> None:
        """Visit the arguments."""
        active.arguments = self._map(active, active.arguments, "input")
        self.handler.enter(active)

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see TraceHandler
        """Visit the results."""
        return self.handler.leave(active, self._map(active, output, "output"))

    def finish_root(self, active: ActiveCall) -> None:
        """Pass the call on."""
        self.handler.finish_root(active)

    def _map(self, active: ActiveCall, value: Any, port: str) -> Any:  # noqa: ANN401
        at = active.call.site
        return replace_tensors(value, port, lambda name, tensor: self.visit(at, name, tensor))


def pass_if_representation(
    judgement: Judgement, check: GenerateCheck, progress: Progress
) -> Judgement:
    """Return the judgement, as a PASS if only the representation differs.

    Raises: MachineError if the model in float64 does not fit into memory.
    """
    ports = {(p.stage.module, p.module, p.port) for p in (one.port for one in judgement.failed)}
    failed, folder, name = FailedPorts(check, sorted(ports)), check.folder, EQUIVALENCE_FOLDER
    (is_recorded,) = call(
        _RECORDING, failed, folder=folder, name=name, progress=progress, python=check.python
    )
    if not is_recorded:
        return judgement
    # A setup function may patch torch in its own process: the trusted one decides.
    name = "equivalence-reference"
    (found,) = call(_VERIFICATION, failed, folder=folder, name=name, progress=progress)
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
    return replace(judgement, verdict=changed, origin=None).with_note(note)


def _is_load_tested(load: JudgedLoad, failed: list[Judged]) -> bool:
    """Return True if the inputs reach every wrong weight, so that equal logits vindicate it.

    The stage of each changed weight must have failed. An embedding does not count: only the rows of
    the used tokens are tested.
    """
    shown = {item.port.stage.module for item in failed if not item.port.kind.endswith("Embedding")}
    return not load.loading and all(finding.location.module in shown for finding in load.changed)


def record_equivalence(failed: FailedPorts, progress: Progress) -> bool:
    """Run the candidate's code in float64 on the host, and record what it computes differently.

    The trace holds changed weights, and values at those failed ports whose module has no changed weight.
    Returns: False if the logits differ, which ends the test.
    Raises: MachineError if the model in float64 does not fit into memory.
    """
    check, device = failed.check, open_device("cpu")
    section = GoldenSection.open(check.golden_folder, check.dtype)
    if section.entry.yardstick_dtype != "float64":
        return False  # no such logits agree to 1e-13
    _prepare(section, device, check)
    options = CandidateOptions.parse(check.options)
    # Two runs; the second only if the logits of the first agree.
    num_tokens = 2 * count_tokens(section.batches)
    with progress.task("running the candidate's code in float64", num_tokens, "tokens"):
        loaded = load_model(
            check.model,
            dtype="float64",
            attention=options.attention,
            experts=options.experts,
            rounded_to=check.dtype,
            remote_code=check.remote_code,
        )
        check_same_model(section.golden, loaded)
        before = weight_hashes(loaded.model)
        side = set_up(Side(loaded, device), check.setup)
        if not _agrees(side, section):
            return False
        after = weight_hashes(side.loaded.model).items()
        changed = {unwrapped_path(name) for name, value in after if before.get(name) != value}
        tensors = _tensors_of(side.loaded.model).items()
        weights = {name: tensor for name, tensor in tensors if name in changed}
        owners = {name.rpartition(".")[0] for name in weights}
        wanted = {(module, port) for stage, module, port in failed.ports if stage not in owners}
        with TraceWriter(check.folder / EQUIVALENCE_FOLDER, {}) as writer:
            if weights:
                writer.attach(_WEIGHTS, {name: one.detach() for name, one in weights.items()})
            kept: dict[CallSite, dict[str, TensorEntry]] = {}

            def keep(at: CallSite, port: str, value: Tensor) -> Tensor:
                if (at.module, port) in wanted:
                    kept.setdefault(at, {})[port] = writer.store(value.detach())
                return value

            if wanted:
                _replay(side, section, keep)
            for order, (site, entries) in enumerate(kept.items()):
                writer.add(Call(site, "", None, order), entries)
    return True


def verify_equivalence(failed: FailedPorts, progress: Progress) -> "Equivalence":
    """Run the yardstick with the recorded weights and values: logits first, stages if they agree.

    Codes of a codebook hide small errors, so outputs that random errors of the same size do not change
    either prove nothing.
    """
    check, device = failed.check, open_device("cpu")
    section = GoldenSection.open(check.golden_folder, check.dtype)
    _prepare(section, device, check)
    recorded = Trace.open(check.folder / EQUIVALENCE_FOLDER)
    num_tokens = 3 * count_tokens(section.batches)
    with progress.task(
        "putting the candidate's values into the exact reference", num_tokens, "tokens"
    ):
        loaded = load_yardstick(
            check.model, device, "float64", check.dtype, check.remote_code, "at once"
        )
        known = _tensors_of(loaded.model)
        weights = recorded.attachment(_WEIGHTS) if _WEIGHTS in recorded.attachments else {}
        with torch.no_grad():
            for name, value in weights.items():
                if name not in known or known[name].shape != value.shape:
                    return None
                known[name].copy_(value)

        def substitute(at: CallSite, port: str, value: Tensor) -> Tensor:
            call = recorded.find(at)
            return value if call is None or port not in call.ports else recorded.tensor(call, port)

        side = Side(loaded, device)
        if not _agrees(side, section, substitute):
            return None
        errors = _errors(_replay(side, section, substitute))
        wanted = {(module, port) for _, module, port in failed.ports}
        # Indices have no small errors.
        disturbed = {at for at in wanted & errors.keys() if not errors[at].num_different}
        random = torch.Generator().manual_seed(0)

        def disturb(at: CallSite, port: str, value: Tensor) -> Tensor:
            value = substitute(at, port, value)
            if (at.module, port) not in disturbed:
                return value
            noise = torch.randn(value.shape, generator=random, dtype=value.dtype)
            error = errors[at.module, port].relative_error
            return value + error * value.pow(2).mean().sqrt() * noise

        if disturbed and _agrees(side, section, disturb):
            return None
        return errors


def _prepare(section: GoldenSection, device: Device, check: GenerateCheck) -> None:
    """Choose the number of threads. Raises: MachineError if the model does not fit into memory."""
    num_parameters = section.golden.model.num_parameters
    needed = 8 * num_parameters + BASE_BYTES
    available = allowed_memory(device, check.max_memory)
    if needed > available:
        raise MachineError(
            f"the model in float64 needs about {format_size(needed)} of memory, and only"
            f" {format_size(available)} is free or allowed by --memory"
        )
    choose_threads(num_parameters)


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {unwrapped_path(name): tensor for name, tensor in tensors}


def _agrees(side: Side, section: GoldenSection, visit: Visit | None = None) -> bool:
    """Return True if the outputs for the golden's tokens agree. visit: as for `_Ports`."""
    outputs = {name: section.tensors(name) for name in section.outputs}
    allowed = {
        name: EXACT_AGREEMENT**2 * sum(float(one.double().pow(2).sum()) for one in tensors)
        for name, tensors in outputs.items()
    }
    difference = dict.fromkeys(outputs, 0.0)
    works, tokens = whole_batches(section.batches), section.tensors("tokens")
    with nullcontext() if visit is None else watched(side, UsageWatch(_Ports(visit))) as tracer:
        for number, (work, forced) in enumerate(zip(works, tokens, strict=True)):
            if tracer is not None:
                work.begin(tracer)
            actual = run_forced(side, work, forced).outputs
            if actual.keys() != outputs.keys():
                return False
            for name, expected in outputs.items():
                change = actual[name].double() - expected[number].double()
                difference[name] += float(change.pow(2).sum())
                # Written so that NaN is a difference. It only grows: other batches cannot undo it.
                if not difference[name] <= allowed[name]:
                    return False
    return True


def _replay(side: Side, section: GoldenSection, visit: Visit) -> ReplayResults:
    replayer = Replayer(section.steps, section.boundary, attention_of(side.loaded))
    watch = UsageWatch(_Ports(visit, replayer))
    works, tokens = whole_batches(section.batches), section.tensors("tokens")
    return replay(side, works, tokens, replayer, watch)


def _errors(results: ReplayResults) -> Differences:
    return {
        (port.module, port.port): PortDifference(port.sums.relative_error, port.exact.num_different)
        for port in results.ports.values()
        if port.sums.relative_error > 0 or port.exact.num_different
    }


def is_representation(failed: Iterable[Judged], errors: Equivalence) -> bool:
    """Return True if the logits agree, and every failed statistic differs as much in float64."""
    return errors is not None and all(
        _differs_as_much(item, errors.get((item.port.module, item.port.port))) for item in failed
    )


def _differs_as_much(failed: Judged, in_float64: PortDifference | None) -> bool:
    if in_float64 is None or failed.statistic == "non-finite":
        return False
    if failed.statistic in OF_INTEGERS:
        return bool(in_float64.num_different)
    observed, exact = failed.port.sums.relative_error, in_float64.relative_error
    return observed <= SAME_ERROR * exact and exact <= SAME_ERROR * observed
