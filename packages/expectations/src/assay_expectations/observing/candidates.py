"""The process that runs models: captures an expectation, or observes the models of several."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from torch import Tensor

from assay.comparing.coverage import Usage
from assay.devices.base import Device
from assay.devices.registry import open_device, open_run
from assay.devices.run_string import Run, parse_run
from assay.errors import UsageError
from assay.generate.generation_loop import count_tokens, limits_of_generation
from assay.generate.passes import Side, run_free, whole_batches
from assay.hooks.module_tracer import NullHandler
from assay.hooks.usage import UsageWatch
from assay.inputs import BatchOptions, InputPlan, plan_batches
from assay.models import LoadedModel, load_model
from assay.models.candidate_code import set_up
from assay.models.load import choose_threads, yardstick_dtype
from assay.progress import subtask
from assay.runs import Progress
from assay_expectations.judging.numbers import LIMITS, judge_numbers, limits_origin
from assay_expectations.observing.distributions import (
    distributions_of,
    forced_log_probabilities,
    layer_errors,
    observe,
    sketch_layers,
)
from assay_expectations.records import (
    Content,
    Distributions,
    Expectation,
    Key,
    Machine,
    Provenance,
    Settings,
    Signature,
    Weight,
    content_differences,
    read_expectation,
)
from assay_expectations.requests import (
    AllSeen,
    Captured,
    CaptureOptions,
    Seen,
    VerifyRequest,
)

_HOST = "cpu"

# Versions that numbers do not depend on.
_IRRELEVANT_VERSIONS = ("python", "system")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A loaded model on its device, with its inputs and its key."""

    side: Side
    plan: InputPlan
    key: Key


def machine_of(run: Run, device: Device) -> Machine:
    """Return the hardware part of the key."""
    architecture = device.architecture()
    if device.vendor.name == _HOST:
        architecture = architecture.partition("-")[0]
    return Machine(
        vendor=device.vendor.name,
        architecture=architecture,
        dtype=run.dtype,
        precision=device.effective_precision(run.dtype),
    )


def versions_of(device: Device) -> dict[str, str]:
    """Return the versions of software that numbers can depend on."""
    versions = {
        name: version
        for name, version in device.versions().items()
        if name not in _IRRELEVANT_VERSIONS
    }
    return versions | {"transformers": transformers.__version__}


def torch_settings() -> Mapping[str, object]:
    """Return the settings of torch that decide if two runs are bitwise equal."""
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "num_threads": torch.get_num_threads(),
    }


def open_candidate(model: str, run: Run, settings: Settings) -> Candidate:
    """Load a model on the device of `run`. Raises: UsageError if it cannot be loaded."""
    device = open_run(run)
    loaded = _load(model, run.dtype, device, settings, None)
    choose_threads(sum(parameter.numel() for parameter in loaded.model.parameters()))
    options = BatchOptions(
        batch_size=settings.batch_size,
        max_new_tokens=settings.max_new_tokens,
        num_prompts=settings.num_prompts,
        seed=settings.seed,
    )
    plan = plan_batches(limits_of_generation(loaded), options, loaded.encode)
    content = Content(
        tokenizer_hash=loaded.tokenizer_hash,
        prompts_hash=plan.content_hash,
        settings=settings,
        weights={name: Weight.of(one) for name, one in sorted(loaded.stored_weights.items())},
    )
    key = Key(machine=machine_of(run, device), content=content)
    return Candidate(Side(loaded, device), plan, key)


def after_setup(candidate: Candidate, setup: str) -> Candidate:
    """Return the candidate after a call of FILE.py:FUNC with its model."""
    loaded = candidate.side.loaded
    changed = replace(loaded, model=set_up(loaded.model, setup))
    return replace(candidate, side=replace(candidate.side, loaded=changed))


def capture_signature(
    model: str, candidate: Candidate, progress: Progress
) -> tuple[Signature, dict[str, float]]:
    """Run the candidate and its yardstick on the same tokens.

    Returns: the signature, and the relative error of each module.
    """
    settings, dtype = candidate.key.content.settings, candidate.side.loaded.dtype
    batches = candidate.plan.batches
    num_tokens = count_tokens(batches)
    with progress.step("loads the yardstick"):
        host = open_device(_HOST)
        num_parameters = sum(p.numel() for p in candidate.side.loaded.model.parameters())
        exact = yardstick_dtype(num_parameters, host.supported_dtypes())
        rounded_to = dtype if exact == "float64" else None
        yardstick = Side(_load(model, exact, host, settings, rounded_to), host)
    # Three runs: generation, then twice its tokens, the second time with projections of modules.
    with progress.task("runs the yardstick", 3 * num_tokens, "tokens"):
        tokens = [run_free(yardstick, work, {}).tokens for work in whole_batches(batches)]
        exactly = forced_log_probabilities(yardstick, batches, tokens)
        exact_layers = sketch_layers(yardstick, batches, tokens)
    top_ids = [
        [logp_NV.topk(settings.top_k, dim=-1).indices for logp_NV in batch] for batch in exactly
    ]
    with progress.task("runs the candidate", 2 * num_tokens, "tokens"):
        captured = forced_log_probabilities(candidate.side, batches, tokens)
        layers = layer_errors(exact_layers, sketch_layers(candidate.side, batches, tokens))
    signature = Signature(
        tokens=[tokens_BN.tolist() for tokens_BN in tokens],
        top_ids=[[ids_NK.tolist() for ids_NK in batch] for batch in top_ids],
        spreads=[[_spreads(logp_NV).tolist() for logp_NV in batch] for batch in exactly],
        yardstick=distributions_of(exactly, top_ids),
        captured=distributions_of(captured, top_ids),
    )
    return signature, layers


def captured_on_host(
    model: str, candidate: Candidate, signature: Signature
) -> Distributions | None:
    """Run the model on the host in the same dtype; return None if the candidate is the host."""
    if candidate.side.device.name == _HOST:
        return None
    host, settings = open_device(_HOST), candidate.key.content.settings
    side = Side(_load(model, candidate.side.loaded.dtype, host, settings, None), host)
    watch = UsageWatch(NullHandler())
    return observe(side, candidate.plan.batches, signature, watch).distributions


def _spreads(logp_NV: Tensor) -> Tensor:
    """Compute the standard deviation over the vocabulary, (N,). Impossible ids count as zero."""
    return logp_NV.masked_fill(logp_NV == -torch.inf, 0.0).std(dim=-1, correction=0)


def _load(
    model: str, dtype: str, device: Device, settings: Settings, rounded_to: str | None
) -> LoadedModel:
    return load_model(
        model,
        dtype=dtype,
        device=device.torch_device,
        attention=None if settings.attention == "default" else settings.attention,
        rounded_to=rounded_to,
    )


CONTAINER = "ASSAY_CONTAINER"


def capture(options: CaptureOptions, progress: Progress) -> Captured:
    """Capture a model on a device."""
    progress.number_phases(5)
    with progress.step(f"loads {options.model} on {options.run}"):
        candidate = open_candidate(options.model, parse_run(options.run), Settings())
    device, machine = candidate.side.device, candidate.key.machine
    signature, layers = capture_signature(options.model, candidate, progress)
    with progress.step("compares with the host"):
        on_host = captured_on_host(options.model, candidate, signature)
    expectation = Expectation(
        model=options.model,
        key=candidate.key,
        captures=[judge_numbers(signature, signature.captured, machine.dtype, LIMITS).ratios],
        limits=LIMITS,
        limits_origin=limits_origin(options.model, machine),
        signature=signature,
        layers=layers,
        provenance=Provenance(
            run=options.run,
            product=device.product(),
            versions=versions_of(device),
            torch_settings=dict(torch_settings()),
            container=os.environ.get(CONTAINER),
            approved_by=options.approved_by,
            reason=options.reason,
        ),
    )
    return Captured(expectation=expectation, on_host=on_host)


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
