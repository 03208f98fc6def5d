"""The process that runs models: captures an expectation, or observes the models of several."""

from pathlib import Path

from assay.comparing.coverage import Usage
from assay.devices.registry import open_run
from assay.devices.run_string import Run, parse_run
from assay.errors import UsageError
from assay.generate.passes.generation_loop import count_tokens
from assay.hooks.module_tracer import NullHandler
from assay.hooks.usage import UsageWatch
from assay.progress import subtask
from assay.runs import Progress
from assay_expectations.observing.candidates import (
    after_setup,
    capture_signature,
    captured_on_host,
    machine_of,
    open_candidate,
    torch_settings,
    versions_of,
)
from assay_expectations.observing.distributions import observe
from assay_expectations.records import (
    Expectation,
    Machine,
    Settings,
    content_differences,
    read_expectation,
)
from assay_expectations.requests import (
    AllSeen,
    Captured,
    Seen,
    SignatureRequest,
    VerifyRequest,
)


def capture(request: SignatureRequest, progress: Progress) -> Captured:
    """Capture a model on a device."""
    progress.number_phases(5)
    with progress.step(f"loads {request.model} on {request.run}"):
        candidate = open_candidate(request.model, parse_run(request.run), Settings())
    device = candidate.side.device
    signature, layers = capture_signature(request.model, candidate, progress)
    with progress.step("compares with the host"):
        on_host = captured_on_host(request.model, candidate, signature)
    return Captured(
        key=candidate.key,
        signature=signature,
        layers=layers,
        on_host=on_host,
        product=device.product(),
        versions=versions_of(device),
        torch_settings=dict(torch_settings()),
    )


def observe_all(request: VerifyRequest, progress: Progress) -> AllSeen:
    """Observe the models of expectation files on a device."""
    run = parse_run(request.run)
    device = open_run(run)
    machine = machine_of(run, device)
    expectations = {file: read_expectation(Path(file)) for file in request.files}
    seen = []
    with progress.task(f"observes on {run}", len(expectations), "expectations") as task:
        for file, expectation in expectations.items():
            is_useful = _is_useful(expectation, machine, [*expectations.values()])
            seen.append(
                _observe(file, expectation, run, request.setup) if is_useful else Seen(file=file)
            )
            task.advance()
    return AllSeen(machine=machine, versions=versions_of(device), seen=seen)


def _is_useful(expectation: Expectation, here: Machine, others: list[Expectation]) -> bool:
    """Return True for this machine; or, if it has none, for machines with the same rounding."""
    if expectation.key.machine == here:
        return True
    there = expectation.key.machine
    rounds_alike = (there.dtype, there.precision) == (here.dtype, here.precision)
    has_own = any(one.model == expectation.model and one.key.machine == here for one in others)
    return rounds_alike and not has_own


def _observe(file: str, expectation: Expectation, run: Run, setup: str | None) -> Seen:
    expected = expectation.key.content
    try:
        with subtask(f"loads {expectation.model}"):
            candidate = open_candidate(expectation.model, run, expected.settings)
    except UsageError as error:
        return Seen(file=file, problem=str(error))
    if stale := content_differences(expected, candidate.key.content):
        return Seen(file=file, stale=stale)
    if setup is not None:
        candidate = after_setup(candidate, setup)
    batches, watch = candidate.plan.batches, UsageWatch(NullHandler())
    with subtask(f"runs {expectation.model}", count_tokens(batches), "tokens"):
        observed = observe(candidate.side, batches, expectation.signature, watch)
    return Seen(file=file, observed=observed, usage=Usage.model_validate(watch.to_json()))
