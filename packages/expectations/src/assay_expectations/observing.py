"""The process that runs models: captures an expectation, or observes the models of several.

Shapes: B rows, N stored tokens of a row, T positions, V vocabulary, K kept ids, R tokens, C channels, M projections.
"""

import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad

from assay.devices.base import Device
from assay.devices.registry import open_device, open_run
from assay.devices.run_string import Run, parse_run
from assay.errors import MachineError, UsageError, assay_command, name_some
from assay.files import UnreadableFileError
from assay.files.safetensors import DTYPES
from assay.generate.generation_loop import (
    count_tokens,
    limits_of_generation,
    model_code,
    timeline_of,
)
from assay.generate.golden import LOGITS
from assay.generate.passes import Side, run_forced, run_free, watched, whole_batches
from assay.hooks.coverage_watch import UsageWatch
from assay.hooks.module_tracer import ModuleTracer, NullHandler
from assay.inputs import (
    Batch,
    BatchOptions,
    InputPlan,
    Prompt,
    load_prompts,
    parse_lengths,
    plan_batches,
    read_prompts,
)
from assay.judge.coverage import Usage
from assay.models import LoadedModel, load_model
from assay.models.candidate_code import set_up
from assay.models.config_files import (
    list_changes,
    list_setting_changes,
    record_settings,
    record_tokenizer,
)
from assay.models.load import FLOAT64_PARAMETERS, choose_threads, yardstick_dtype
from assay.models.sources import local_folder, resolve_model
from assay.models.stored_tensors import map_folder
from assay.models.tensor_sources import find_sources
from assay.models.weight_files import hash_tensor, read_tensors, stored_weights
from assay.progress import subtask
from assay.runs import Progress, provenance
from assay_expectations.differences import (
    content_differences,
    describe_built_in,
    describe_prompts,
    has_same_inputs,
    missing_tokenizer_files,
)
from assay_expectations.judging import (
    is_within_limits,
    judge_by,
    judge_numbers,
    limits_of,
    limits_origin,
    values_of,
)
from assay_expectations.projections import layer_errors, pool_sketches, project, sketch_layers
from assay_expectations.records import (
    AllSeen,
    Captured,
    CaptureOptions,
    Content,
    Distributions,
    Expectation,
    Key,
    Machine,
    Observed,
    Provenance,
    Seen,
    Settings,
    Signature,
    VerifyRequest,
    Weight,
    read_expectation,
    versions_of_encoding,
)

# Stored positions of a row if the model does not generate. Every position has read all others.
_MAX_POSITIONS = 16


def run_rows(
    side: Side,
    batches: Sequence[Batch],
    tokens: Sequence[Tensor],
    tracer: ModuleTracer | None = None,
) -> tuple[list[list[Tensor]], list[str]]:
    """Run a model under forced `tokens`, (B, N) by batch. tracer: an attached tracer, or None.

    Returns: rows by batch and text, (N, V) in float64: log-probabilities, or values of other outputs; and the
        names of these outputs, [] for logits. If the model does not generate, rows are those of a few
        positions of each text, never in padding.
    """
    rows: list[list[Tensor]] = []
    names: list[str] = []
    for work, tokens_BN in zip(whole_batches(batches), tokens, strict=True):
        if tracer is not None:
            tracer.begin_batch(work.batch.number, timeline_of(work.batch))
        outputs = run_forced(side, work, tokens_BN).outputs
        if LOGITS in outputs:
            logp_BTV = outputs[LOGITS].double().log_softmax(-1)
            generates = tokens_BN.shape[1] > 0
            rows.append([*logp_BTV] if generates else _rows_of([logp_BTV], work.batch))
        else:
            names = [*outputs]
            rows.append(_rows_of([*outputs.values()], work.batch))
    return rows, names


def _rows_of(outputs: Sequence[Tensor], batch: Batch) -> list[Tensor]:
    """Return the rows of each text, (N, V): at a few positions of (B, T, V), one of (B, V).

    Rows that are shorter than others end with zeros.
    """
    mask_BT = batch.attention_mask
    parts = [
        [
            value[_kept_positions(mask_T)].flatten(1)
            if output.ndim > 2 and output.shape[1] == batch.length
            else value.flatten()[None]
            for value, mask_T in zip(output.double(), mask_BT, strict=True)
        ]
        for output in outputs
    ]
    width = max(rows.shape[1] for of_output in parts for rows in of_output)
    return [
        torch.cat([pad(rows, (0, width - rows.shape[1])) for rows in text])
        for text in zip(*parts, strict=True)
    ]


def _kept_positions(mask_T: Tensor) -> Tensor:
    """Choose at most 16 evenly spaced positions outside of padding."""
    valid = mask_T.nonzero().flatten()
    places = torch.linspace(0, len(valid) - 1, min(len(valid), _MAX_POSITIONS)).round().long()
    return valid[places]


def distributions_of(
    rows: Sequence[Sequence[Tensor]], top_ids: Sequence[Sequence[Tensor]]
) -> Distributions:
    """Compress log-probabilities, by batch and row (N, V).

    top_ids: the kept ids, by batch and row (N, K).
    """
    return Distributions(
        log_probabilities=[
            [_kept(logp_NV, ids_NK).tolist() for logp_NV, ids_NK in zip(*batch, strict=True)]
            for batch in zip(rows, top_ids, strict=True)
        ],
        projections=[[project(logp_NV).tolist() for logp_NV in batch] for batch in rows],
    )


def observe(
    side: Side, batches: Sequence[Batch], signature: Signature, watch: UsageWatch
) -> Observed:
    """Run the model on the tokens of `signature`, while `watch` records its usage."""
    tokens, top_ids = recorded_tokens(signature)
    with watched(side, watch) as tracer:
        given, outputs = run_rows(side, batches, tokens, tracer)
    if outputs != signature.outputs:
        names = [", ".join(one) or LOGITS for one in (outputs, signature.outputs)]
        raise UsageError(f"the model returns {names[0]}, and {names[1]} was captured")
    return Observed(
        distributions=distributions_of(given, top_ids),
        dtype=_usual_dtype(side),
        torch_settings=dict(torch_settings()),
    )


def recorded_tokens(signature: Signature) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return the forced tokens, (B, N) by batch, and the kept ids, by batch and row (N, K)."""
    tokens = [
        torch.tensor(rows, dtype=torch.long).reshape(len(rows), -1) for rows in signature.tokens
    ]
    return tokens, [[torch.tensor(ids) for ids in batch] for batch in signature.top_ids]


def _kept(logp_NV: Tensor, ids_NK: Tensor) -> Tensor:
    """Return the log-probabilities of the ids, and last of all other ids together."""
    others_NV = logp_NV.scatter(-1, ids_NK, -torch.inf)
    return torch.cat([logp_NV.gather(-1, ids_NK), others_NV.logsumexp(-1, keepdim=True)], dim=-1)


def _usual_dtype(side: Side) -> str:
    sizes: dict[torch.dtype, int] = {}
    for parameter in side.loaded.model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    usual = max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
    return str(usual).removeprefix("torch.")


HOST = "cpu"

# Versions that numbers do not depend on.
_IRRELEVANT_VERSIONS = ("python", "system")


# Messages, each with its role and content; empty for a prompt of token ids.
Chat = Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A loaded model on its device, with its inputs and its key."""

    side: Side
    plan: InputPlan
    key: Key


def machine_of(run: Run, device: Device) -> Machine:
    """Return the hardware part of the key."""
    architecture = device.architecture()
    if device.vendor.name == HOST:
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


def open_candidate(
    model: str,
    run: Run,
    settings: Settings,
    prompts: Sequence[Sequence[int]] | str | None = None,
    chats: Sequence[Chat] = (),
) -> Candidate:
    """Load a model on the device of `run`.

    prompts: token ids, or a file; None for built-in prompts. chats: from which today's template makes the token ids.
    Raises: UsageError if it cannot be loaded.
    """
    device = open_run(run)
    loaded = _load(model, run.dtype, device, settings, None)
    try:
        loaded.require_text_model()
    except UsageError as error:
        keep = assay_command(
            "capture", model, run="cpu/float32", noise_for=run.dtype, output="golden"
        )
        check = assay_command("check", "generate", model, candidate=str(run), golden="golden")
        raise UsageError(
            f"{error}. To keep its outputs, and to verify them:\n  {keep}\n  {check}"
        ) from None
    choose_threads(sum(parameter.numel() for parameter in loaded.model.parameters()))
    plan = _plan(loaded, settings, prompts, chats)
    content = Content(
        tokenizer_hash=loaded.tokenizer_hash,
        tokenizer=record_tokenizer(model),
        **_hashes_of(plan),
        settings=settings,
        weights={name: Weight.of(one) for name, one in sorted(loaded.stored_weights.items())},
    )
    key = Key(machine=machine_of(run, device), content=content)
    return Candidate(Side(loaded, device), plan, key)


def _hashes_of(plan: InputPlan) -> dict[str, str]:
    """Return the hashes of all inputs, with and without padding, by their fields in `Content`."""
    batches = tuple(replace(batch, pad_token_id=0) for batch in plan.batches)
    unpadded = replace(plan, batches=batches)
    return {"prompts_hash": plan.content_hash, "unpadded_hash": unpadded.content_hash}


def with_inputs(candidate: Candidate, inputs: Sequence[Sequence[int]]) -> Candidate:
    """Return the candidate with the recorded built-in prompts, which another tokenizer changes. inputs: if recorded."""
    plan = candidate.plan
    if len(inputs) != len(plan.prompts):
        return candidate
    batches = [
        replace(batch, rows=tuple(tuple(inputs[number]) for number in batch.prompts))
        for batch in plan.batches
    ]
    plan = replace(plan, batches=tuple(batches))
    content = candidate.key.content.model_copy(update=_hashes_of(plan))
    key = candidate.key.model_copy(update={"content": content})
    return replace(candidate, plan=plan, key=key)


def _find_changed_weights(
    candidate: Candidate, expected: Mapping[str, Weight], same: Mapping[str, bool]
) -> tuple[list[str], list[str]]:
    """Return the changed tensors of the checkpoint that the model does not read, and the modules that hold the others.

    same: from `_compare_values`.
    """
    model, actual = candidate.side.loaded.model, candidate.key.content.weights
    names = [
        name
        for name in sorted(expected.keys() | actual.keys())
        if expected.get(name) != actual.get(name) and not same.get(name)
    ]
    if not names:
        return [], []
    found = find_sources(model, dict.fromkeys(names, torch.empty(0)))
    held = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    changed = {*found.unknown, *(source.name for source in found.sources)}
    tensors = {id(held[name]) for name in changed if name in held}
    modules = {name.rpartition(".")[0] for name, one in held.items() if id(one) in tensors}
    return [name for name in found.unused if name in actual], sorted(modules)


def _plan(
    loaded: LoadedModel,
    settings: Settings,
    prompts: Sequence[Sequence[int]] | str | None,
    chats: Sequence[Chat] = (),
) -> InputPlan:
    limits = replace(limits_of_generation(loaded), images=(), no_media="")  # texts alone
    if limits.whole_prefill:  # a model that always raises reads no chunks either
        with model_code(), torch.no_grad():
            loaded.model(torch.arange(2, device=next(loaded.model.parameters()).device)[None])
    lengths = parse_lengths(settings.prompt_length) if settings.prompt_length else None
    options = BatchOptions(
        lengths=lengths,
        batch_size=settings.batch_size,
        max_new_tokens=settings.max_new_tokens,
        num_prompts=settings.num_prompts,
        seed=settings.seed,
    )
    given: list[Prompt] | None = None
    encode_chat = loaded.encode_chat if settings.chat else None
    if encode_chat is None and settings.chat and (chats or isinstance(prompts, str)):
        raise UsageError(f"--chat: {loaded.source.reference} has no chat template")
    if isinstance(prompts, str):
        given = load_prompts(
            Path(prompts),
            loaded.encode,
            limits,
            max_new_tokens=settings.max_new_tokens,
            encode_chat=encode_chat,
        )
    elif prompts is not None and encode_chat is not None and chats:
        pairs = zip(prompts, chats, strict=True)
        given = [Prompt(None, tuple(encode_chat(chat) if chat else ids)) for ids, chat in pairs]
    elif prompts is not None:
        given = [Prompt(None, tuple(ids)) for ids in prompts]
        options = replace(options, lengths=None)  # they were cut at the capture
    return plan_batches(limits, options, loaded.encode, given)


def _describe_texts(candidate: Candidate, expectation: Expectation) -> list[str]:
    """Describe what the tokenizer and the chat template of today make of the texts of the recorded prompts."""
    expected, actual = expectation.key.content, candidate.key.content
    is_same = expected.tokenizer_hash == actual.tokenizer_hash
    unchanged = [] if is_same else ["no recorded prompt changes"]
    if not expectation.chats:
        if expectation.prompts and not is_same:
            return [
                "whether it changes the prompts is not known: the file has only their token ids"
            ]
        return unchanged if _inputs_of(candidate) == expectation.inputs else []
    try:
        plan = _plan(
            candidate.side.loaded, expected.settings, expectation.prompts, expectation.chats
        )
    except UsageError as error:
        return [str(error)]
    different = describe_prompts(expectation.prompts, [list(one.ids) for one in plan.prompts])
    if not different:
        return unchanged
    now = versions_of_encoding()
    then = now | (expectation.provenance.process.get("versions") or {})
    packages = ", ".join(list_changes({name: then[name] for name in now}, now))
    return [f"the chat template makes {different}{packages and f' ({packages})'}"]


def _compare_values(
    model: str, expected: Mapping[str, Weight], actual: Mapping[str, Weight]
) -> dict[str, bool]:
    """Return, for each tensor that is stored in another dtype, True if it has the recorded values."""
    names = [
        name
        for name, then in expected.items()
        if name in actual and then.dtype in DTYPES and actual[name].dtype != then.dtype
    ]
    if not names:
        return {}
    with local_folder(resolve_model(model), "refuse") as folder:
        stored = map_folder(folder)
        return {
            name: name in stored and _has_values(stored[name], expected[name]) for name in names
        }


def _has_values(tensor: Tensor, expected: Weight) -> bool:
    converted = tensor.to(getattr(torch, DTYPES[expected.dtype][0]))
    is_exact = torch.equal(converted.to(tensor.dtype), tensor)
    return is_exact and hash_tensor(converted, expected.dtype) == expected.hash


def after_setup(candidate: Candidate, setup: str) -> Candidate:
    """Return the candidate after a call of FILE.py:FUNC with its model."""
    loaded = candidate.side.loaded
    changed = replace(loaded, model=set_up(loaded.model, setup))
    return replace(candidate, side=replace(candidate.side, loaded=changed))


def open_yardstick(model: str, candidate: Candidate, config_folder: Path | None = None) -> Side:
    """Load the yardstick. config_folder: as of `load_model`."""
    host, loaded, exact = open_device(HOST), candidate.side.loaded, _yardstick_dtype(candidate)
    rounded_to = loaded.dtype if exact == "float64" else None
    settings = candidate.key.content.settings
    loaded = _load(model, exact, host, settings, rounded_to, config_folder)
    return Side(loaded, host)


def _yardstick_dtype(candidate: Candidate) -> str:
    num_parameters = sum(p.numel() for p in candidate.side.loaded.model.parameters())
    return yardstick_dtype(num_parameters, open_device(HOST).supported_dtypes())


def captured_on_host(
    model: str, candidate: Candidate, signature: Signature, *, is_host: bool = True
) -> Distributions | None:
    """Run the model on the host in the same dtype; return None if the candidate is that run.

    is_host: False if the candidate's model was changed after it was loaded.
    """
    if candidate.side.device.name == HOST and is_host:
        return None
    host, settings = open_device(HOST), candidate.key.content.settings
    side = Side(_load(model, candidate.side.loaded.dtype, host, settings, None), host)
    watch = UsageWatch(NullHandler())
    return observe(side, candidate.plan.batches, signature, watch).distributions


def _spreads(logp_NV: Tensor) -> Tensor:
    """Compute the standard deviation over the vocabulary, (N,). Impossible ids count as zero."""
    return logp_NV.masked_fill(logp_NV == -torch.inf, 0.0).std(dim=-1, correction=0)


def _load(
    model: str,
    dtype: str,
    device: Device,
    settings: Settings,
    rounded_to: str | None,
    config_folder: Path | None = None,
) -> LoadedModel:
    return load_model(
        model,
        dtype=dtype,
        device=device.torch_device,
        attention=None if settings.attention == "default" else settings.attention,
        rounded_to=rounded_to,
        config_folder=config_folder,
    )


CONTAINER = "ASSAY_CONTAINER"


def capture(options: CaptureOptions, progress: Progress) -> Captured:
    """Capture a model on a device."""
    progress.number_phases(5)
    with progress.step(f"loading {options.model} on {options.run}"):
        run = parse_run(options.run)
        candidate = open_candidate(
            options.model, run, options.settings, options.prompts, options.chats
        )
    for note in candidate.side.loaded.notes:
        progress.note(note)
    expectation = capture_loaded(options, candidate, progress)
    with progress.step("comparing with the host"):
        on_host = captured_on_host(options.model, candidate, expectation.signature)
    return Captured(expectation=expectation, on_host=on_host)


def capture_loaded(
    options: CaptureOptions, candidate: Candidate, progress: Progress
) -> Expectation:
    """Run the candidate and its yardstick on the same tokens."""
    device, machine = candidate.side.device, candidate.key.machine
    settings, batches = candidate.key.content.settings, candidate.plan.batches
    num_tokens = count_tokens(batches)
    with progress.step("loading the exact reference"):
        yardstick = open_yardstick(options.model, candidate)
    # Three runs: generation, then twice its tokens, the second time with projections of modules.
    with progress.task("running the exact reference", 3 * num_tokens, "tokens"):
        tokens = [run_free(yardstick, work, {}).tokens for work in whole_batches(batches)]
        exactly, outputs = run_rows(yardstick, batches, tokens)
        exact_layers = sketch_layers(yardstick, batches, tokens)
    top_ids = [
        [logp_NV.topk(min(settings.top_k, logp_NV.shape[-1])).indices for logp_NV in batch]
        for batch in exactly
    ]
    with progress.task(f"running on {device.name}", 2 * num_tokens, "tokens"):
        captured, _ = run_rows(candidate.side, batches, tokens)
        layers = layer_errors(exact_layers, sketch_layers(candidate.side, batches, tokens))
    signature = Signature(
        tokens=[tokens_BN.tolist() for tokens_BN in tokens],
        top_ids=[[ids_NK.tolist() for ids_NK in batch] for batch in top_ids],
        spreads=[[_spreads(logp_NV).tolist() for logp_NV in batch] for batch in exactly],
        yardstick=distributions_of(exactly, top_ids),
        captured=distributions_of(captured, top_ids),
        outputs=outputs,
    )
    limits, chats = limits_of(signature), options.chats
    if settings.chat and isinstance(options.prompts, str):
        chats = [line.messages for line in read_prompts(Path(options.prompts))]
    return Expectation(
        model=options.model,
        key=candidate.key,
        captures=[values_of(judge_numbers(signature, signature.captured, machine.dtype, limits))],
        limits=limits,
        limits_origin=limits_origin(options.model, machine),
        signature=signature,
        layers=layers,
        exact_layers=pool_sketches(exact_layers),
        config=record_settings(options.model),
        prompts=[]
        if options.prompts is None
        else [list(prompt.ids) for prompt in candidate.plan.prompts],
        chats=chats,
        inputs=[] if options.prompts is not None else _inputs_of(candidate),
        provenance=Provenance(
            run=options.run,
            product=device.product(),
            versions=versions_of(device),
            torch_settings=dict(torch_settings()),
            yardstick_dtype=yardstick.loaded.dtype,
            container=os.environ.get(CONTAINER),
            approved_by=options.approved_by,
            reason=options.reason,
        ),
    )


def _inputs_of(candidate: Candidate) -> list[list[int]]:
    return [list(row) for batch in candidate.plan.batches for row in batch.rows]


def observe_all(request: VerifyRequest, progress: Progress) -> AllSeen:
    """Observe the models of expectation files on a device."""
    run = parse_run(request.run)
    device = open_run(run)
    machine = machine_of(run, device)
    expectations = {file: read_expectation(Path(file)) for file in request.files}
    seen = []
    with progress.task(f"observing on {run}", len(expectations), "expectations") as task:
        for file, expectation in expectations.items():
            is_of_here = expectation.key.machine == machine
            seen.append(
                _observe(file, expectation, run, request) if is_of_here else Seen(file=file)
            )
            task.advance()
    return AllSeen(
        machine=machine,
        versions=versions_of(device),
        cpu=provenance()["cpu"],
        setup=request.setup,
        model=request.model,
        seen=seen,
    )


def find_model(model: str, file: Path) -> str:
    """Return a relative model folder as it is seen from here, or else from the nearest folder around `file`."""
    relative = Path(model)
    if not model.startswith("micro:") and not relative.is_absolute() and not relative.is_dir():
        for folder in file.resolve().parents:
            if (folder / relative / "config.json").is_file():
                return str(folder / relative)
    return model


def _observe(file: str, expectation: Expectation, run: Run, request: VerifyRequest) -> Seen:
    expected = expectation.key.content
    model = request.model or find_model(expectation.model, Path(file))
    try:
        resolve_model(model)
        config = list_setting_changes(expectation.config, record_settings(model))
    except (UsageError, MachineError) as error:
        return Seen(file=file, missing=str(error).partition("; the recipes are")[0])
    prompts = expectation.prompts or None
    try:
        with subtask(f"loading {model}"):
            candidate = open_candidate(model, run, expected.settings, prompts)
    except UnreadableFileError as error:
        return Seen(file=file, missing=str(error), config=config)
    except UsageError as error:
        missing = missing_tokenizer_files(expected.tokenizer, record_tokenizer(model))
        lost = f"missing tokenizer files: {name_some(missing)}; " if missing else ""
        traceback.print_exception(error)
        is_same = not config and _has_recorded_files(model, expected)
        return Seen(file=file, problem=f"{lost}{error}", config=config, has_recorded_files=is_same)
    here = [list(one.ids) for one in candidate.plan.prompts] if prompts else []
    built_in = describe_built_in(expectation.inputs, _inputs_of(candidate), config)
    prompts_of = expectation.prompts, here
    stale = content_differences(expected, candidate.key.content, prompts_of, built_in)
    same = _compare_values(model, expected.weights, candidate.key.content.weights)
    if same:
        then, now = expected.weights, candidate.key.content.weights
        sizes = {name: size for name, (_, size) in DTYPES.items()}
        is_narrower = all(sizes.get(now[one].dtype, 0) <= sizes[then[one].dtype] for one in same)
        stale.append(
            f"all {len(same)} tensors changed dtype, and their values were rounded"
            if is_narrower and not any(same.values())
            else f"{sum(same.values())} of {len(same)} tensors in another dtype have equal values"
        )
    unread, modules = _find_changed_weights(candidate, expected.weights, same)
    if unread:
        stale.append(f"the model does not read {name_some(unread)}")
    stale += _describe_texts(candidate, expectation)
    seen = Seen(
        file=file, model=model, stale=stale, changed_modules=modules, config=config,
        has_other_prompts=bool(expectation.inputs) and _inputs_of(candidate) != expectation.inputs,
    )  # fmt: skip
    candidate = with_inputs(candidate, expectation.inputs)
    if stale and not has_same_inputs(expected, candidate.key.content):
        return seen
    if request.setup is not None:
        candidate = after_setup(candidate, request.setup)
    batches, watch = candidate.plan.batches, UsageWatch(NullHandler())
    try:
        with subtask(f"running {model}", count_tokens(batches), "tokens"):
            observed = observe(candidate.side, batches, expectation.signature, watch)
    except UsageError as error:
        traceback.print_exception(error)
        found = {"problem": str(error), "has_recorded_files": not (stale or config)}
        return seen.model_copy(update=found)
    found = {"observed": observed, "usage": Usage.model_validate(watch.to_json())}
    return seen.model_copy(update=found | _request_reference(candidate, expectation, observed))


def _has_recorded_files(model: str, expected: Content) -> bool:
    """Return True if a model that cannot be loaded has the weights and tokenizer of the capture."""
    with local_folder(resolve_model(model), "refuse") as folder:
        weights = stored_weights(read_tensors(folder) or [])
    same_weights = {name: Weight.of(one) for name, one in weights.items()} == expected.weights
    return same_weights and record_tokenizer(model) == expected.tokenizer


def _request_reference(
    candidate: Candidate, expectation: Expectation, observed: Observed
) -> dict[str, Any]:
    """Return the fields of `Seen` that request a reference; for a model too large for one, `exact_left_out`."""
    if not is_within_limits(judge_by(expectation, observed.distributions)):
        tokens, _ = recorded_tokens(expectation.signature)
        calls = sketch_layers(candidate.side, candidate.plan.batches, tokens)
        return {"sketches": {name: [call.numpy() for call in of] for name, of in calls.items()}}
    # In float32, rounding hides what a run within its limits could.
    dtypes = {_yardstick_dtype(candidate), expectation.provenance.yardstick_dtype}
    if dtypes == {"float64"}:
        return {"sketches": {}}
    return {"exact_left_out": f"over {FLOAT64_PARAMETERS / 1e9:g} billion parameters"}
