"""The reference process: capture a golden, for any number of candidates."""

import shutil
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from assay.devices.base import Device
from assay.devices.registry import describe_run, open_run
from assay.devices.sim import trusted_device
from assay.dtypes import float_format
from assay.errors import UsageError
from assay.files import write_whole
from assay.generate.generation_loop import count_tokens
from assay.generate.golden import (
    LOAD,
    LOGITS,
    MANIFEST,
    MEDIA,
    NOISE,
    NOISE_PREFIX,
    OUTPUTS,
    USAGE,
    GoldenManifest,
    ModelIdentity,
    Section,
    attach_batch,
    attached_batches,
)
from assay.generate.other_uses import find_other_uses
from assay.generate.passes import (
    RecordedChoices,
    RepeatedWork,
    RootInputs,
    Side,
    Work,
    accumulated_errors,
    attach_choice_noise,
    attach_text_steps,
    find_contradictions,
    find_pointwise,
    processed_scores,
    record,
    record_choices,
    replace_choices,
    replay,
    run_all_free,
    run_forced,
    whole_batches,
    with_whole_texts,
)
from assay.generate.run_plan import RunPlan, Widening, plan_inputs, plan_run
from assay.generate.spec import GoldenSpec
from assay.hooks.coverage_watch import UsageWatch
from assay.hooks.module_tracer import NullHandler
from assay.hooks.tensors import Boundary
from assay.hooks.widening import widen_on_use
from assay.inputs import InputPlan
from assay.judge.results import attach_results
from assay.models import LoadedModel, count_parameters, load_model, weight_hashes
from assay.models.config_files import attention_of, record_settings
from assay.models.inspect.inspection import inspect_load
from assay.models.inspect.quantized_modules import round_inputs
from assay.models.load import (
    FLOAT64_PARAMETERS,
    FUSED,
    SMALL_MODEL_PARAMETERS,
    add_biases_last,
    choose_threads,
    use_fused_attention,
    yardstick_dtype,
)
from assay.models.quantization.dequantizing import dequantize_folder
from assay.models.sources import RemoteCode, local_folder
from assay.progress import advance_task, subtask
from assay.recording.modules import Recorder
from assay.replay.modules import Replayer
from assay.replay.routing import NoiseOfChoices
from assay.replay.trace_views import StepwiseTrace
from assay.runs import Progress, provenance
from assay.trace import Trace, TraceWriter, read_digest

# Phases of a capture, without and with recorded modules.
_PHASES, _MODULE_PHASES = 7, 11  # one more in 16 bits


def capture_golden(spec: GoldenSpec, progress: Progress) -> GoldenManifest:
    """Run the reference and write the golden into `spec.folder`."""
    device = open_run(spec.reference)
    num_parameters = count_parameters(spec.model)
    choose_threads(num_parameters)
    wide = yardstick_dtype(num_parameters, device.supported_dtypes())
    if wide in spec.noise_for:
        raise UsageError(
            f"a candidate in {wide} cannot be judged: its exact reference would be computed"
            f" in {wide} as well (float64 is for devices that have it, and models of at"
            f" most {FLOAT64_PARAMETERS / 1e9:g} billion parameters)"
        )
    # The estimate of a small model takes as long as a phase of its check.
    limits = (spec.max_disk, spec.max_memory, spec.max_seconds)
    is_limited = any(limit is not None for limit in limits)
    run = RunPlan(spec.inputs)
    if num_parameters >= SMALL_MODEL_PARAMETERS or is_limited:
        run = plan_run(spec, device, wide, progress)
    plan: InputPlan | None = None
    sections = {}
    identity: ModelIdentity | None = None
    notes: list[str] = []
    num_phases = [
        _MODULE_PHASES + float_format(dtype).is_narrow if spec.level == "module" else _PHASES
        for dtype in spec.noise_for
    ]
    progress.number_phases(sum(num_phases))
    for dtype, precision in ((dtype, one) for dtype in spec.noise_for for one in (wide, "float32")):
        if dtype in sections or dtype == precision:
            continue
        with progress.step(f"loading {spec.model} in {precision}, for {dtype}"):
            yardstick = load_yardstick(
                spec.model, device, precision, dtype, spec.remote_code, run.widening
            )
            if plan is None or identity is None:
                plan = plan_inputs(run.inputs, yardstick)
                identity = identify(yardstick, plan)
                notes = [*plan.notes, *yardstick.notes]
                given_up = spec.inputs.max_new_tokens - run.inputs.max_new_tokens
                if given_up:
                    notes.append(
                        f"--budget: the last {given_up} of {spec.inputs.max_new_tokens} new tokens"
                        " of each prompt are not checked"
                    )
        with TraceWriter(spec.folder / dtype, {"model": identity.name, "dtype": dtype}) as writer:
            section = _Capture(spec, device, writer, plan, dtype, progress)
            section.run_yardstick(Side(yardstick, device, record_choices(writer)))
            notes += chain.from_iterable(section.contradictions.values())
            del yardstick
            retries = section.has_nan and precision == "float64" and dtype != "float32"
            if not retries:
                sections[dtype] = section.run_noise(precision)
        if retries:
            notes.append(
                f"the model computes NaN in float64: the exact reference for {dtype} is in float32"
            )
            shutil.rmtree(spec.folder / dtype)
            continue
        digest = read_digest(spec.folder / dtype)
        sections[dtype] = sections[dtype].model_copy(update={"trace_digest": digest})
    if identity is None or plan is None:
        raise UsageError("a golden needs at least one dtype")
    manifest = GoldenManifest(
        model=identity,
        reference=describe_run(device, spec.reference),
        inputs=run.inputs,
        inputs_hash=plan.content_hash,
        level=spec.level,
        sections=sections,
        notes=notes,
        environment=provenance(),
        settings=record_settings(spec.model, spec.remote_code),
    )
    manifest = manifest.model_copy(update={"digest": manifest.content_hash()})
    write_whole(spec.folder / MANIFEST, manifest.model_dump_json(by_alias=True, indent=1))
    return manifest


def identify(loaded: LoadedModel, plan: InputPlan) -> ModelIdentity:
    """Return the content hashes and sizes that identify the model, and whether it generates in this plan."""
    return ModelIdentity(
        name=loaded.source.reference,
        architecture=type(loaded.model).__name__,
        weights_hash=loaded.weights_hash,
        tokenizer_hash=loaded.tokenizer_hash,
        checkpoint_dtype=loaded.checkpoint_dtype,
        vocab_size=loaded.vocab_size,
        num_parameters=sum(p.numel() for p in loaded.model.parameters()),
        max_positions=loaded.max_positions,
        can_generate=plan.generates,
    )


def load_reference(
    model: str,
    device: Device,
    dtype: str,
    remote_code: RemoteCode,
    rounded_to: str | None = None,
    experts: str | None = None,
) -> LoadedModel:
    """Load the reference model.

    Its attention is eager, because transformers versions pass different masks to sdpa. Quantized weights
    are dequantized, so that no library of the candidate computes on this side.
    """
    return load_model(
        model,
        dtype=dtype,
        device=device.torch_device,
        attention="eager",
        experts=experts,
        rounded_to=rounded_to,
        remote_code=remote_code,
        weights="dequantized",
    )


def load_yardstick(
    model: str,
    device: Device,
    dtype: str,
    rounded_to: str,
    remote_code: RemoteCode,
    widening: Widening,
) -> LoadedModel:
    """Load the yardstick in `dtype`, with weights and buffers rounded to `rounded_to`."""
    if widening == "at once":
        return load_reference(model, device, dtype, remote_code, rounded_to)
    experts = "eager" if dtype == "float64" else None
    narrow = load_reference(model, device, rounded_to, remote_code, experts=experts)
    widen_on_use(narrow.model, getattr(torch, dtype))
    note = f"memory is short: the exact reference widens the weights of one module at a time to {dtype}"
    return replace(narrow, dtype=dtype, notes=(*narrow.notes, note))


@dataclass
class _Capture:
    """The yardstick and the noise run for one dtype of a golden."""

    spec: GoldenSpec
    device: Device
    writer: TraceWriter
    plan: InputPlan
    dtype: str
    progress: Progress

    def __post_init__(self) -> None:
        self.works: list[Work] = whole_batches(self.plan.batches)
        self.texts = self.works
        """The works as they are recorded: with whole texts where the model allows it."""
        self.num_tokens = count_tokens(self.plan.batches)
        self.boundary = Boundary.exact_inputs_for(getattr(torch, self.dtype))
        self.tokens: list[Tensor] = []
        self.outputs: list[str] = []
        self.has_nan = False
        """True if the yardstick returned NaN."""
        self.contradictions: dict[int | None, list[str]] = {}
        """Notes of `find_contradictions` for each way to read prompts."""

    def run_yardstick(self, side: Side) -> None:
        """Generate freely, then record every module with these tokens forced."""
        records = self.spec.level == "module"
        self.writer.attach_json("inputs", self.plan.to_json())
        if self.plan.tensors:
            self.writer.attach(MEDIA, self.plan.tensors)
        if records:
            with self.progress.step("testing if one call records a whole text"):
                self.texts = with_whole_texts(side, self.works, self.progress)
            attach_text_steps(self.writer, self.texts)
        inputs = RootInputs(self.writer, self.texts)
        watch = UsageWatch(inputs if records else NullHandler(), root_only=records)
        with self.progress.task("generating", self.num_tokens, "tokens"):
            self._generate(side, watch)
        with self.progress.task("computing scores", len(self.works), "batches"):
            if self.plan.generates:
                self._attach_scores(side)
        if records:
            slots = watch.slots
            watch = UsageWatch(Recorder(self.writer, self.boundary))
            with self.progress.task("recording every module", self.num_tokens, "tokens"):
                record(side, self.texts, self.tokens, watch, inputs.num_calls)
            watch.slots = slots
        usage = watch.to_json()
        if watch.unread:
            usage["other_uses"] = find_other_uses(side, self.works[0], watch.unread, watch.called)
        self.writer.attach_json(USAGE, usage)

    def _generate(self, side: Side, watch: UsageWatch) -> None:
        """Generate freely while `watch` observes, and attach tokens and outputs."""
        sampling = self.spec.inputs.sampling
        generated = run_all_free(side, self.works, sampling, watch)
        for work, free in zip(self.works, generated, strict=True):
            # Teacher forcing would make the same calls with the same logits.
            self.tokens.append(free.tokens)
            self._attach("tokens", work, free.tokens)
            for name, output in free.outputs.items():
                self._attach(name, work, output)
                self.has_nan |= bool(output.isnan().any())
            self.outputs = list(free.outputs)
        self.writer.attach_json(OUTPUTS, self.outputs)

    def run_noise(self, wide: str) -> Section:
        """Run the same work in the candidate's dtype, and measure it against the yardstick."""
        with self.progress.step(f"noise run: loading {self.spec.model} in {self.dtype}"):
            loaded = load_reference(self.spec.model, self.device, self.dtype, self.spec.remote_code)
        with self.progress.step("noise run: comparing what is loaded with the files"):
            inspection = inspect_load(loaded, self.spec.remote_code)
            self.writer.attach_json(LOAD, inspection.report.model_dump(mode="json"))
            self.writer.attach_json("weights", weight_hashes(loaded.model))
        add_biases_last(loaded.model)
        if loaded.is_dequantized:
            with local_folder(loaded.source, self.spec.remote_code) as folder:
                if (dequantized := dequantize_folder(folder)) is not None:
                    round_inputs(loaded.model, dequantized)
        trace = Trace.open(self.writer.folder)
        choices = RecordedChoices.read(trace, self.plan.batches)
        noise_of_choices = NoiseOfChoices()
        num_parameters = sum(p.numel() for p in loaded.model.parameters())
        side = Side(loaded, trusted_device(self.device, self.dtype, num_parameters))
        if choices.modules:
            side = replace(side, choices=replace_choices(choices, noise_of_choices))
        deterministic = self._attach_noise_outputs(side, wide)
        attach_choice_noise(self.writer, noise_of_choices.noise())
        if self.spec.level == "module":
            with self.progress.step("noise run: measuring how errors accumulate"):
                errors = accumulated_errors(side, self.plan.batches[0], StepwiseTrace.open(trace))
                self.writer.attach_json("noise-drift", errors)
            with self.progress.task("noise run: measuring every module", self.num_tokens, "tokens"):
                with subtask("finding modules that only round"):
                    pointwise = find_pointwise(side, self.works[0])
                attention = attention_of(side.loaded)
                replayer = Replayer(trace, self.boundary, attention, pointwise)
                results = replay(side, self.texts, self.tokens, replayer)
            if float_format(self.dtype).is_narrow:
                # Eager attention rounds weights, and fused attention rounds exponentials. The noise of one
                # alone is too small where it happens to be exact, as for four equal weights. One batch tells.
                num_fused = int(use_fused_attention(loaded.model))
                works, tokens = self.texts[:num_fused], self.tokens[:num_fused]
                num_tokens = count_tokens(work.batch for work in works)
                with self.progress.task("noise run: fusing attention", num_tokens, "tokens"):
                    fused = Replayer(trace, self.boundary, FUSED, pointwise)
                    others = replay(side, works, tokens, fused, tolerated=(Exception,))
                    results.keep_larger_row_slopes(others)
            attach_results(self.writer, NOISE, results)
        return Section(
            dtype=self.dtype,
            yardstick_dtype=wide,
            reference_deterministic=deterministic,
            num_calls=len(trace.calls),
        )

    def _attach_scores(self, side: Side) -> None:
        logits = attached_batches(Trace.open(self.writer.folder), LOGITS, self.plan.batches)
        sampling = self.spec.inputs.sampling
        for work, tokens, expected in zip(self.works, self.tokens, logits, strict=True):
            scores = processed_scores(side, work, tokens, expected, sampling)
            self._attach("scores", work, scores)
            chunk = work.batch.prefill_chunk
            if not work.batch.holds_media and chunk not in self.contradictions:
                self.contradictions[chunk] = find_contradictions(side, work, tokens, expected)
            advance_task("batches")

    def _attach_noise_outputs(self, side: Side, wide: str) -> bool:
        """Attach the forced outputs. Returns: True if a second run is bitwise equal."""
        # Choices of experts were recorded step by step.
        works = self.texts if side.choices is None else self.works
        repeated = RepeatedWork(works)
        noise_has_nan = False
        with self.progress.task("noise run: forcing the same tokens", self.num_tokens, "tokens"):
            for number, (work, tokens) in enumerate(zip(works, self.tokens, strict=True)):
                outputs = run_forced(side, work, tokens).outputs
                for name in self.outputs:
                    self._attach(NOISE_PREFIX + name, work, outputs[name])
                    noise_has_nan |= bool(outputs[name].isnan().any())
                    if self.has_nan and bool(outputs[name].isnan().all()):
                        raise UsageError(
                            f"{self.spec.model} computes nothing but NaN as {name.removeprefix('output-')}, in"
                            f" {wide} and in {self.dtype}, with eager attention: no reference to compare with"
                        )
                repeated.offer(number, outputs)
        if self.has_nan and not noise_has_nan:
            raise UsageError(
                f"{self.spec.model} computes NaN in {wide}, but not in {self.dtype}: its code does not run in {wide},"
                " which the reference needs"
            )
        with self.progress.task("noise run: running again", repeated.num_tokens, "tokens"):
            return repeated.run_again(side, self.tokens).identical

    def _attach(self, name: str, work: Work, tensor: Tensor) -> None:
        attach_batch(self.writer, name, work.batch.number, tensor)
