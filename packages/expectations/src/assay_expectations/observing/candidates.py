"""Candidates: models on their device, with inputs and key, and the capture of their signature."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import transformers
from torch import Tensor

from assay.devices.base import Device
from assay.devices.registry import open_device, open_run
from assay.devices.run_string import Run
from assay.generate.passes.generation_loop import count_tokens, limits_of_generation
from assay.generate.passes.passes import Side, run_free, whole_batches
from assay.hooks.module_tracer import NullHandler
from assay.hooks.usage import UsageWatch
from assay.inputs import BatchOptions, InputPlan, plan_batches
from assay.models import LoadedModel, load_model
from assay.models.candidate_setup import set_up
from assay.models.size import choose_threads, yardstick_dtype
from assay.runs import Progress
from assay_expectations.observing.distributions import (
    distributions_of,
    forced_log_probabilities,
    observe,
)
from assay_expectations.observing.layers import layer_errors, sketch_layers
from assay_expectations.records import (
    Content,
    Distributions,
    Key,
    Machine,
    Settings,
    Signature,
    Weight,
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
