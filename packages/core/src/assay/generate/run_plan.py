"""Plan the inputs of a run, and a run that fits on this machine and into its budget."""

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from assay.devices.base import Device
from assay.devices.sim import trusted_device
from assay.errors import AssayError, MachineError, UsageError, name_some
from assay.estimates import (
    SECONDS_PER_COMPARED_VALUE,
    SECONDS_PER_LOADED_WEIGHT,
    SECONDS_PER_STORED_BYTE,
    Speed,
    TrialCall,
    allowed_memory,
    report_unknown,
    require_disk,
)
from assay.generate.generation_loop import count_tokens, limits_of_generation
from assay.generate.passes import steps_of_texts
from assay.generate.spec import GoldenSpec, InputOptions
from assay.hooks.suspension import exact_for
from assay.hooks.tensors import Boundary
from assay.hooks.widening import is_widened_on_use
from assay.inputs import (
    BatchOptions,
    InputPlan,
    describe_hard_cases,
    load_prompts,
    parse_lengths,
    plan_batches,
)
from assay.media import encode_images, find_processing
from assay.models import LoadedModel
from assay.models.load import load_outline
from assay.progress import format_duration, format_size
from assay.runs import Progress


def plan_inputs(options: InputOptions, loaded: LoadedModel) -> InputPlan:
    """Plan the batches that `options` ask for."""
    processing = find_processing(loaded)
    with exact_for(loaded.dtype):
        limits = limits_of_generation(loaded, processing)
    prompts = None
    if options.chat and loaded.encode_chat is None:
        raise UsageError(f"--chat: {loaded.source.reference} has no chat template")
    if options.prompts is not None and not limits.has_tokens:
        raise UsageError(
            f"--prompts: {loaded.source.reference} takes {loaded.media_input}, no text"
        )
    if options.prompts is not None:
        prompts = load_prompts(
            Path(options.prompts),
            loaded.encode,
            limits,
            max_new_tokens=options.max_new_tokens,
            encode_chat=loaded.encode_chat if options.chat else None,
            encode_images=partial(encode_images, processing=processing, as_chat=options.chat),
        )
    lengths = parse_lengths(options.prompt_length) if options.prompt_length else None
    plan_options = BatchOptions(
        lengths=lengths,
        batch_size=options.batch_size,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
    )
    plan = plan_batches(limits, plan_options, loaded.encode, prompts)
    missed = [
        name for name, met in describe_hard_cases(plan.batches, limits).items() if met is False
    ]
    named = {"--prompts": options.prompts, "--prompt-length": options.prompt_length}
    given = " and ".join(name for name, value in named.items() if value is not None)
    built_in = f" (a check without {given} tries what the model's context allows)" if given else ""
    notes = [f"these inputs do not try: {', '.join(missed)}{built_in}"] if missed else []
    notes += _notes_on_double_bos(plan, getattr(loaded.config, "bos_token_id", None))
    return replace(plan, notes=(*plan.notes, *notes)) if notes else plan


def _notes_on_double_bos(plan: InputPlan, bos_token_id: object) -> list[str]:
    """Note prompts that begin with two BOS tokens: the tokenizer added one to a chat template's."""
    twice = sorted(
        number
        for batch in plan.batches
        for number, row in zip(batch.prompts, batch.rows, strict=True)
        if bos_token_id is not None and list(row[:2]) == [bos_token_id, bos_token_id]
    )
    if not twice:
        return []
    prompts = name_some([f"prompt {number}" for number in twice])
    return [f"two BOS tokens (id {bos_token_id}) at the beginning of {prompts}"]


# How the yardstick's weights are widened: all before it runs, or those of each module while it runs.
Widening = Literal["at once", "on use"]

# Imports, and tensors of one call.
BASE_BYTES = 700 << 20

# Copies of the logits in memory while they are written.
_LOGIT_COPIES = 3

# Stored with each logit of the yardstick: the noise run's logit and the sampler's score, both in float32.
_BYTES_PER_LOGIT = 8

# Fewer new tokens would leave no decode step.
_FEWEST_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory and disk that a golden needs, in bytes."""

    memory: int
    memory_on_use: int
    """Memory if the weights of one module at a time are widened for the yardstick."""
    disk: int


def estimate_needs(
    spec: GoldenSpec,
    outline: LoadedModel,
    plan: InputPlan,
    yardstick_dtype: str,
    trial: TrialCall,
) -> Needs:
    """Estimate what the golden of `spec` needs.

    outline: the model without weights.
    """
    itemsize = getattr(torch, yardstick_dtype).itemsize
    weights = list(outline.model.parameters())
    num_weights = sum(one.numel() for one in weights)
    num_narrow = sum(one.numel() for one in weights if is_widened_on_use(one))
    widest = max(
        sum(one.numel() for one in module.parameters(recurse=False) if is_widened_on_use(one))
        for module in outline.model.modules()
    )
    narrow = max(getattr(torch, dtype).itemsize for dtype in spec.noise_for)
    # A model that does not generate has logits for all tokens.
    num_logits = [
        len(batch.rows) * (batch.max_new_tokens or batch.length) * outline.vocab_size
        for batch in plan.batches
    ]
    disk = 0
    for dtype in spec.noise_for:
        stored = Boundary.exact_inputs_for(getattr(torch, dtype)).stored or torch.float64
        disk += sum(num_logits) * (itemsize + _BYTES_PER_LOGIT)
        if spec.level == "module":  # logits are results of modules, too
            of_modules = _num_recorded(trial, plan) + sum(num_logits)
            disk += int(of_modules * stored.itemsize)
    of_calls = _LOGIT_COPIES * max(num_logits) * itemsize + BASE_BYTES
    return Needs(
        memory=num_weights * itemsize + of_calls,
        memory_on_use=num_narrow * narrow
        + (num_weights - num_narrow + widest) * itemsize
        + of_calls,
        disk=disk,
    )


def _num_recorded(trial: TrialCall, plan: InputPlan) -> float:
    num_steps = sum(len(one.rows) * max(1, one.max_new_tokens) for one in plan.batches)
    return trial.num_recorded(count_tokens(plan.batches), num_steps)


def widening_within(num_weights: int, dtype: str, allowed: int) -> Widening:
    """Return how to widen a yardstick to `dtype`, so that one call fits into `allowed` bytes."""
    num_bytes = num_weights * getattr(torch, dtype).itemsize
    return "on use" if num_bytes + BASE_BYTES > allowed else "at once"


def choose_widening(needs: Needs, allowed: int) -> Widening:
    """Return the widening with which the reference fits into `allowed` bytes.

    Raises: MachineError, with the numbers, if it fits with neither.
    """
    if needs.memory <= allowed:
        return "at once"
    if needs.memory_on_use > allowed:
        raise MachineError(
            f"the reference needs about {format_size(needs.memory_on_use)} of memory, even if it"
            f" widens one module at a time. Only {format_size(allowed)} is free or allowed by --memory."
            " Use shorter --prompts, or fewer --max-new-tokens"
        )
    return "on use"


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The inputs and the widening of a run."""

    inputs: InputOptions
    """Those of the capture, with fewer new tokens where the budget is short."""
    widening: Widening = "at once"


def plan_run(spec: GoldenSpec, device: Device, yardstick_dtype: str, progress: Progress) -> RunPlan:
    """Estimate time, memory and disk, and plan a run within their limits.

    Raises: MachineError if memory, disk or the budget are too small.
    """
    try:
        estimator = _Estimator(spec, device, yardstick_dtype)
        estimate = estimator.of(spec.inputs)
    except AssayError:
        raise
    except Exception as error:  # noqa: BLE001 - a model's own code may raise anything without values
        limits = {
            "--disk": spec.max_disk,
            "--memory": spec.max_memory,
            "--budget": spec.max_seconds,
        }
        report_unknown(error, limits, progress)
        return RunPlan(spec.inputs)
    if spec.max_seconds is not None:
        estimate = estimator.within(spec.max_seconds, estimate)
        fewer, wanted = estimate.inputs.max_new_tokens, spec.inputs.max_new_tokens
        if fewer < wanted:
            progress.note(f"--budget: each prompt gets {fewer} new tokens instead of {wanted}")
    needs = estimate.needs
    advice = "shorter --prompts, fewer --max-new-tokens, or --level logits"
    require_disk("the golden", needs.disk, spec.folder, spec.max_disk, advice)
    widening = choose_widening(needs, allowed_memory(device, spec.max_memory))
    memory = needs.memory if widening == "at once" else needs.memory_on_use
    progress.note(
        f"the reference needs about {format_size(memory)} of memory and {format_size(needs.disk)} of disk"
    )
    if spec.level == "module":
        progress.note(
            f"the reference takes about {format_duration(estimate.reference)}, and a candidate on"
            f" {spec.reference.device} {format_duration(estimate.candidate)}"
        )
    return RunPlan(estimate.inputs, widening)


@dataclass(frozen=True, slots=True)
class _Estimate:
    """The needs of a run with these inputs, and the seconds of both sides."""

    inputs: InputOptions
    needs: Needs
    reference: float
    candidate: float
    """On the reference's device."""

    @property
    def seconds(self) -> float:
        """Seconds of both sides."""
        return self.reference + self.candidate


class _Estimator:
    """Estimates runs of one capture with any inputs."""

    def __init__(self, spec: GoldenSpec, device: Device, yardstick_dtype: str) -> None:
        self._spec, self._yardstick_dtype = spec, yardstick_dtype
        self._outline = load_outline(spec.model, spec.remote_code)
        self._trial = TrialCall.of(self._outline.model)
        self._num_weights = sum(one.numel() for one in self._outline.model.parameters())
        needs = self._needs(plan_inputs(spec.inputs, self._outline))
        is_wide = needs.memory <= allowed_memory(device, spec.max_memory)
        candidate = spec.noise_for[0]
        self._wide = Speed.probe(device, yardstick_dtype, None if is_wide else candidate)
        self._candidate = Speed.probe(device, candidate)
        trusted = trusted_device(device, candidate, self._num_weights)
        self._noise = Speed.probe(trusted, candidate)

    def of(self, inputs: InputOptions) -> _Estimate:
        """Estimate a run with these inputs."""
        plan = plan_inputs(inputs, self._outline)
        needs = self._needs(plan)
        num_prompt_tokens = sum(len(one.rows) * one.length for one in plan.batches)
        num_tokens = count_tokens(plan.batches)
        steps = sum(max(1, one.max_new_tokens) for one in plan.batches), num_prompt_tokens
        reads_texts = steps_of_texts(self._outline, plan.batches)
        texts = (len(plan.batches), num_tokens) if reads_texts else steps
        load = self._num_weights * SECONDS_PER_LOADED_WEIGHT
        replay = _num_recorded(self._trial, plan) * SECONDS_PER_COMPARED_VALUE
        # The yardstick generates and records; the noise run is forced and replays.
        reference = 2 * load + replay + needs.disk * SECONDS_PER_STORED_BYTE
        for speed, passes in ((self._wide, (steps, texts)), (self._noise, (texts, texts))):
            reference += sum(self._trial.seconds(speed, *one) for one in passes)
        # The candidate generates, is forced where its tokens differ, and replays.
        candidate = load + replay + 2.5 * self._trial.seconds(self._candidate, *steps)
        return _Estimate(inputs, needs, len(self._spec.noise_for) * reference, candidate)

    def _needs(self, plan: InputPlan) -> Needs:
        return estimate_needs(self._spec, self._outline, plan, self._yardstick_dtype, self._trial)

    def within(self, max_seconds: float, estimate: _Estimate) -> _Estimate:
        """Halve the number of new tokens until both sides fit into the budget.

        All prompts and the first steps are kept. Raises: MachineError if those take too long.
        """
        while estimate.seconds > max_seconds:
            num_new, generates = estimate.inputs.max_new_tokens, self._outline.can_generate
            if num_new <= _FEWEST_TOKENS or not generates:
                of_tokens = f" of {num_new} new tokens" if generates else ""
                raise MachineError(
                    f"the check{of_tokens} takes about {format_duration(math.ceil(estimate.seconds))},"
                    f" but --budget allows {format_duration(max_seconds)}. Use shorter --prompts"
                )
            fewer = max(_FEWEST_TOKENS, num_new // 2)
            estimate = self.of(estimate.inputs.model_copy(update={"max_new_tokens": fewer}))
        return estimate
