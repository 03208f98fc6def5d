"""What a model says on a device, in the process that runs it.

Shapes: B rows, N generated tokens, V vocabulary, K kept tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import transformers
from torch import Tensor

from assay.devices.base import Device
from assay.devices.registry import is_host_adapter, open_device, open_run
from assay.devices.run_string import Run, parse_device
from assay.errors import UsageError
from assay.generate.passes.generation_loop import limits_of_generation
from assay.generate.passes.passes import Side, run_forced, run_free, whole_batches
from assay.inputs import InputPlan, PlanOptions, plan_batches
from assay.models import LoadedModel, load_model
from assay.models.candidate_setup import apply_setup
from assay.models.size_policy import choose_threads, yardstick_dtype
from assay.plugins import load_object
from assay.runs import Progress
from assay_expectations.records import (
    Content,
    Expectation,
    Key,
    LogProbabilities,
    Machine,
    Settings,
    Signature,
)

# Versions that change without changing a number.
_OTHER_VERSIONS = ("python", "system")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A loaded model on its device, with its inputs and its key."""

    side: Side
    plan: InputPlan
    key: Key


def machine_of(run: Run, device: Device) -> Machine:
    """The part of the key that the hardware decides."""
    architecture = device.architecture()
    if is_host_adapter(parse_device(run.device).kind):
        architecture = architecture.partition("-")[0]
    return Machine(
        vendor=device.vendor.name,
        architecture=architecture,
        dtype=run.dtype,
        precision=device.effective_precision(run.dtype),
    )


def software_of(device: Device) -> dict[str, str]:
    """The part of the key that the installed software decides."""
    versions = {
        name: version for name, version in device.versions().items() if name not in _OTHER_VERSIONS
    }
    return versions | {"transformers": transformers.__version__}


def open_candidate(model: str, run: Run, settings: Settings, setup: str | None = None) -> Candidate:
    """Load `model` as it is to be observed. Raises: UsageError if it does not generate."""
    device = open_run(run)
    loaded = _load(model, run.dtype, device, settings, None)
    if not loaded.can_generate:
        raise UsageError(f"{model} generates nothing: there is no expectation of such models yet")
    choose_threads(sum(parameter.numel() for parameter in loaded.model.parameters()))
    options = PlanOptions(
        batch_size=settings.batch_size,
        max_new_tokens=settings.max_new_tokens,
        num_prompts=settings.num_prompts,
        seed=settings.seed,
    )
    plan = plan_batches(limits_of_generation(loaded), options, loaded.encode)
    content = Content(
        weights_hash=loaded.weights_hash,
        tokenizer_hash=loaded.tokenizer_hash,
        prompts_hash=plan.content_hash,
        settings=settings,
    )
    key = Key(machine=machine_of(run, device), software=software_of(device), content=content)
    if setup is not None:
        loaded = replace(loaded, model=apply_setup(load_object(setup), loaded.model, setup))
    return Candidate(Side(loaded, device), plan, key)


def capture_signature(model: str, candidate: Candidate, progress: Progress) -> Signature:
    """What the model says, beside what it would say without rounding."""
    settings, dtype = candidate.key.content.settings, candidate.side.loaded.dtype
    works = whole_batches(candidate.plan.batches)
    with progress.step("yardstick"):
        host = open_device("cpu")
        num_parameters = sum(p.numel() for p in candidate.side.loaded.model.parameters())
        exact = yardstick_dtype(num_parameters, host.supported_dtypes())
        rounded_to = dtype if exact == "float64" else None
        yardstick = Side(_load(model, exact, host, settings, rounded_to), host)
        tokens = [run_free(yardstick, work, {}).tokens for work in works]
        exact_BNV = [
            run_forced(yardstick, work, tokens_BN).logits
            for work, tokens_BN in zip(works, tokens, strict=True)
        ]
    top_ids = [logits_BNV.topk(settings.top_k, dim=-1).indices for logits_BNV in exact_BNV]
    with progress.step("captured run"):
        captured = observe(candidate, tokens, top_ids)
    return Signature(
        tokens=[tokens_BN.tolist() for tokens_BN in tokens],
        top_ids=[ids_BNK.tolist() for ids_BNK in top_ids],
        yardstick=[
            log_probabilities(logits_BNV, ids_BNK)
            for logits_BNV, ids_BNK in zip(exact_BNV, top_ids, strict=True)
        ],
        captured=captured,
    )


def observe(
    candidate: Candidate, tokens: Sequence[Tensor], top_ids: Sequence[Tensor]
) -> list[LogProbabilities]:
    """What the model says about `top_ids` when it is forced to follow `tokens`."""
    works = whole_batches(candidate.plan.batches)
    return [
        log_probabilities(run_forced(candidate.side, work, tokens_BN).logits, ids_BNK)
        for work, tokens_BN, ids_BNK in zip(works, tokens, top_ids, strict=True)
    ]


def observe_expectation(expectation: Expectation, candidate: Candidate) -> list[LogProbabilities]:
    """What the model says where `expectation` was captured."""
    signature = expectation.signature
    return observe(
        candidate,
        [torch.tensor(rows) for rows in signature.tokens],
        [torch.tensor(rows) for rows in signature.top_ids],
    )


def log_probabilities(logits_BNV: Tensor, ids_BNK: Tensor) -> LogProbabilities:
    """Of each of `ids_BNK` among the whole vocabulary, and last of all other tokens together."""
    all_BNV = logits_BNV.double().log_softmax(-1)
    kept_BNK = all_BNV.gather(-1, ids_BNK)
    others_BNV = all_BNV.scatter(-1, ids_BNK, -torch.inf)
    rest_BN1 = others_BNV.logsumexp(-1, keepdim=True)
    values: LogProbabilities = torch.cat([kept_BNK, rest_BN1], dim=-1).tolist()
    return values


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
