"""The candidate process: load, set up and run the model under test, and write its results.

It never judges, because a setup function may have patched anything in this process.
"""

import inspect
import shlex
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from assay.devices.registry import describe_run, open_run
from assay.errors import UsageError
from assay.generate.generation_loop import OutputError, count_tokens
from assay.generate.golden import (
    REPLAY,
    USAGE,
    GoldenManifest,
    GoldenSection,
    attach_batch,
)
from assay.generate.passes import (
    RecordedChoices,
    Repeatability,
    RepeatedWork,
    Side,
    accumulated_errors,
    processed_scores,
    read_choice_noise,
    replace_choices,
    replay,
    run_all_free,
    run_forced,
    single_rows,
    whole_batches,
)
from assay.generate.run_plan import plan_inputs
from assay.generate.spec import (
    CandidateOptions,
    CandidateReport,
    GenerateCheck,
    InputOptions,
)
from assay.hooks.coverage_watch import UsageWatch
from assay.hooks.module_tracer import NullHandler
from assay.judge.results import attach_results
from assay.judge.wording import format_count
from assay.launch import Rank
from assay.models import LoadedModel, candidate_code, load_model, weight_hashes
from assay.models.config_files import attention_of, first_line
from assay.models.inspect.inspection import inspect_changes, inspect_load
from assay.models.load import choose_threads, load_outline
from assay.parallel.rank_boundaries import RankBoundaries, share_heads
from assay.parallel.tensor_parallel import apply_tensor_parallel
from assay.plugins import load_object
from assay.replay.modules import Replayer
from assay.replay.routing import NearTieChoices
from assay.runs import Progress
from assay.runs.provenance import describe_python
from assay.runs.results import rank_folder
from assay.sites import JudgedLevel, unwrapped_path
from assay.trace import TraceWriter
from assay.verdicts import Level, Outcome

_NAMES_SHOWN = 200
# Excludes the time of a setup function.
_NUM_PHASES = {"tokens": 5, "logits": 7, "modules": 9}


def check_candidate(check: GenerateCheck, progress: Progress) -> None:
    """Read setup function, configuration and options, so that a mistake costs no reference run.

    Raises: UsageError for what `load_candidate` would refuse later.
    """
    if check.setup is not None:
        function = load_object(check.setup)
        with suppress(ValueError):  # a function of C code has no signature
            signature = inspect.signature(function)
            try:
                signature.bind(None)
            except TypeError as error:
                raise UsageError(
                    f"{check.setup}{signature} cannot be called with the model alone: {error}"
                ) from None
    options = CandidateOptions.parse(check.options)
    chosen = {"attention": options.attention, "experts": options.experts}
    given = {name: value for name, value in chosen.items() if value is not None}
    if not given and check.num_ranks == 1:
        return
    with progress.step(f"reading the configuration of {check.model}"):
        try:
            outline = load_outline(check.model, check.remote_code)
        except Exception:  # noqa: BLE001 - code of the model, without values
            return
        if check.num_ranks > 1:
            config: Any = outline.model.config
            share_heads(config.num_attention_heads, config.num_key_value_heads, check.mesh["tp"])
        for name, value in given.items():
            try:
                load_outline(check.model, check.remote_code, **{name: value})
            except Exception as error:
                message = f"candidate option {name}={value}: {first_line(error)}"
                raise UsageError(message) from error


def check_same_model(golden: GoldenManifest, loaded: LoadedModel) -> None:
    """Raise UsageError if the golden was made of another model."""
    for what, expected, actual in (
        ("weights", golden.model.weights_hash, loaded.weights_hash),
        ("tokenizer", golden.model.tokenizer_hash, loaded.tokenizer_hash),
    ):
        if expected != actual:
            names = golden.model.name, loaded.source.reference
            hashes = f"hash {expected} at the capture, {actual} of {names[1]}"
            if names[0] == names[1]:
                raise UsageError(
                    f"{names[0]} has changed since the golden was captured: {what}, {hashes}; restore its files, or"
                    " capture again"
                )
            raise UsageError(
                f"the golden is of another model, {names[0]}: {what}, {hashes}; to see what differs: assay"
                f" compare {shlex.join(names)}"
            )


def _check_same_inputs(golden: GoldenManifest, loaded: LoadedModel, check: GenerateCheck) -> None:
    """Raise UsageError if the user's input options differ from the golden's."""
    given = [name for name in InputOptions.model_fields if name in check.given]
    wanted = golden.inputs.model_copy(update={name: getattr(check.inputs, name) for name in given})
    different = [name for name in given if getattr(golden.inputs, name) != getattr(wanted, name)]
    # A prompts file may have changed since the capture.
    if not different and "prompts" not in given:
        return
    # This machine may lack the golden's prompts file; then the inputs cannot be planned here.
    planned = "prompts" in given or wanted.prompts is None or Path(wanted.prompts).is_file()
    same_plan = planned and plan_inputs(wanted, loaded).content_hash == golden.inputs_hash
    if same_plan and wanted.sampling == golden.inputs.sampling:
        return
    was = ", ".join(f"{name}={getattr(golden.inputs, name)!r}" for name in different)
    raise UsageError(
        f"the golden has other inputs: it was captured with {was}; leave these options out, or"
        " capture a golden with them"
        if different
        else "the golden has other inputs: the prompts have changed since; capture it again"
    )


def load_candidate(check: GenerateCheck, golden: GoldenManifest, rank: Rank | None = None) -> Side:
    """Load, set up, shard for `rank` and compile the candidate's model."""
    options = CandidateOptions.parse(check.options)
    side = set_up(_load(check, options, golden, rank), check.setup)
    return _distribute(side, options, rank)


def _load(
    check: GenerateCheck,
    options: CandidateOptions,
    golden: GoldenManifest,
    rank: Rank | None,
) -> Side:
    """Load the candidate's model on its device."""
    if check.level == "modules" and golden.level != "module":
        raise UsageError(
            f"{check.golden_folder} was captured at level {golden.level}, which says nothing of"
            f" {check.level}: check with --level {golden.level}, or capture it again"
        )
    if rank is None:
        device = open_run(check.candidate)
        choose_threads(golden.model.num_parameters)
    else:
        device = rank.device
    options.apply_to_process()
    loaded = load_model(
        check.model,
        dtype=check.dtype,
        device=device.torch_device,
        attention=options.attention,
        experts=options.experts,
        remote_code=check.remote_code,
    )
    check_same_model(golden, loaded)
    if check.golden is not None:
        _check_same_inputs(golden, loaded, check)
    return Side(loaded, device)


def set_up(side: Side, setup: str | None) -> Side:
    """Apply the setup function FILE.py:FUNC, if any, to the model of a side."""
    if setup is None:
        return side
    model = candidate_code.set_up(side.loaded.model, setup)
    return replace(side, loaded=replace(side.loaded, model=model))


def _distribute(side: Side, options: CandidateOptions, rank: Rank | None) -> Side:
    """Shard the model of a side for `rank`, and compile it if the options say so."""
    if rank is not None:
        mesh = rank.mesh["tp"]
        layout = RankBoundaries(apply_tensor_parallel(side.loaded.model, mesh), mesh.get_group())
        side = replace(side, layout=layout)
    loaded = options.compiled(side.loaded, side.device)
    return replace(side, loaded=loaded, compiled=options.compile)


def run_candidate(
    check: GenerateCheck, progress: Progress, rank: Rank | None = None
) -> CandidateReport:
    """Run the candidate, or one rank of it, and write its results as a trace.

    The trace goes to the candidate's folder; with several ranks, to a folder for each rank there.
    """
    run = check.candidate
    options = CandidateOptions.parse(check.options)
    section = GoldenSection.open(check.golden_folder, run.dtype)
    num_phases = _NUM_PHASES[check.level] + bool(check.setup)
    if check.level == "modules" and options.compile:
        num_phases -= 1  # how errors accumulate is measured by hooks, which break compiled graphs
    progress.number_phases(num_phases)
    with progress.step(f"loading {check.model} on {run}"):
        side = _load(check, options, section.golden, rank)
    with progress.step("comparing what is loaded with the files"):
        inspection = inspect_load(side.loaded, check.remote_code)
    if check.setup is not None:
        with progress.step(f"running {check.setup}"):
            side = set_up(side, check.setup)
    with progress.step("comparing the weights with the reference's"):
        different = [
            name
            for name in _different_weights(section, side.loaded.model)
            if not inspection.is_quantized(name)
        ]
        dtype = getattr(torch, run.dtype)
        changes = inspect_changes(side.loaded.model, dtype, inspection, different)
        untied = _untied(section, side.loaded.model)
    side = _distribute(side, options, rank)
    candidate = _Candidate(side, section, check.level, options)
    folder = check.candidate_folder
    if rank is not None:
        folder = rank_folder(folder, rank.number)
    with TraceWriter(folder, {"run": str(run)}) as writer:
        repeatability = candidate.write(writer, progress)
    settings: dict[str, Any] = {
        "attention": attention_of(side.loaded),
        "setup": check.setup,
        "options": check.options,
    }
    if rank is not None:
        settings["mesh"] = dict(check.mesh)
    return CandidateReport(
        run=describe_run(side.device, run) | describe_python(check.python) | settings,
        deterministic=repeatability.identical,
        spread=repeatability.spread,
        weights_different=different[:_NAMES_SHOWN],
        load=inspection.report,
        changes=changes,
        untied=untied,
        problems=candidate.problems,
        notes=[*side.loaded.notes, *candidate.notes],
        peak_memory_bytes=side.device.peak_memory_bytes(),
    )


class _Candidate:
    def __init__(
        self,
        side: Side,
        section: GoldenSection,
        level: JudgedLevel,
        options: CandidateOptions,
    ) -> None:
        self._choices = NearTieChoices(read_choice_noise(section.trace))
        recorded = RecordedChoices.read(section.trace, section.batches)
        if recorded.modules and not options.compile:  # compiled graphs cannot be changed
            side = replace(side, choices=replace_choices(recorded, self._choices))
        self._side = side
        self._section = section
        self._level = level
        self._alone = options.batch_size is not None
        self._num_replaced = 0
        self._absent_masks: Mapping[str, AbstractSet[str]] = {}
        self.problems: dict[str, Level] = {}
        self._works = (
            whole_batches(section.batches)
            if options.batch_size is None
            else single_rows(section.batches)
        )

    @property
    def notes(self) -> list[str]:
        """Return notes for the verdict on how the candidate ran."""
        notes = []
        if self._num_replaced:
            notes.append(
                f"near ties of a router or an indexer: for {self._num_replaced} tokens the candidate chose other"
                " experts or keys than the reference; the levels tokens and logits use the reference's choice"
            )
        if (
            any(work.batch.holds_media and len(work.batch.rows) > 1 for work in self._works)
            and self._alone
        ):
            notes.append("batch-size=1: texts in a batch with images ran together")
        if self._side.compiled and self._level == "modules":
            notes.append(
                "the level modules ran graphs that are split at module boundaries; the levels tokens"
                " and logits ran the graphs as compiled"
            )
        notes += [
            f"{name} is absent on the candidate in {format_count(len(modules), 'module')}: if its attention,"
            f" {attention_of(self._side.loaded)}, needs one, register it with transformers.AttentionMaskInterface"
            for name, modules in self._absent_masks.items()
        ]
        return notes

    def write(self, writer: TraceWriter, progress: Progress) -> Repeatability:
        """Make all passes, and measure the candidate's repeatability."""
        repeated = RepeatedWork(self._works)
        repeatability = Repeatability(identical=True, spread=0.0)
        num_tokens = count_tokens(work.batch for work in self._works)
        own: list[Tensor] = []
        forced: list[int] = []
        with progress.task("generating", num_tokens, "tokens"), self._noting("tokens"):
            own, forced = self._generate(writer, repeated)
        tokens = own
        if self._level != "tokens":
            tokens = self._expected("tokens")
            num_forced = count_tokens(self._works[number].batch for number in forced)
            with (
                progress.task("reading the reference's tokens", num_forced, "tokens"),
                self._noting("logits"),
            ):
                self._force(writer, tokens, forced, repeated)
            with progress.step("computing scores"), self._noting("sampler"):
                self._score(writer, tokens)
        with progress.task("running again", repeated.num_tokens, "tokens"):
            if self._has_output:
                repeatability = repeated.run_again(self._side, tokens)
        if self._level == "modules":
            # Hooks break the graphs of compiled models.
            if not self._side.compiled and self._has_output:
                with progress.step("measuring how errors accumulate"):
                    section = self._section
                    errors = accumulated_errors(self._side, section.batches[0], section.steps)
                    writer.attach_json("drift", errors)
            with progress.task("measuring every module", num_tokens, "tokens"):
                self._replay(writer, tokens)
        return repeatability

    @contextmanager
    def _noting(self, level: str) -> Iterator[None]:
        """Note output that cannot be compared, and end the context."""
        try:
            yield
        except OutputError as error:
            if error.raised:
                traceback.print_exc()
            outcome = Outcome.NOT_COMPARED if error.raised else Outcome.FAIL
            reason = " ".join(str(error).split())  # of several lines where code of the user raised
            self.problems[level] = Level(verdict=outcome, reason=reason)
            if level == "tokens":
                reason = f"no text to compare: {reason}"
                self.problems["logits"] = Level(verdict=Outcome.NOT_COMPARED, reason=reason)

    @property
    def _has_output(self) -> bool:
        return not self.problems.keys() & {"tokens", "logits"}

    def _generate(
        self, writer: TraceWriter, repeated: RepeatedWork
    ) -> tuple[list[Tensor], list[int]]:
        """Generate freely.

        Returns: the tokens of each work, and the numbers of works whose logits another run gives.
            A free run that chose the reference's tokens is also the run that was given them.
        """
        sampling = self._section.golden.inputs.sampling
        # The replay observes usage as well. Hooks break the graphs of compiled models.
        unwatched = self._level == "modules" or self._side.compiled
        watch = None if unwatched else UsageWatch(NullHandler())
        expected = None if self._level == "tokens" else self._expected("tokens")
        tokens: list[Tensor] = []
        forced: list[int] = []
        runs = zip(self._works, run_all_free(self._side, self._works, sampling, watch), strict=True)
        for _, batch in groupby(runs, key=lambda run: run[0].source.batch):
            before, parts = self._choices.num_replaced, list(batch)
            numbers = range(len(tokens), len(tokens) + len(parts))
            tokens += [free.tokens for _, free in parts]
            if expected is None:
                for number, (_, free) in zip(numbers, parts, strict=True):
                    repeated.offer(number, free.outputs)
            elif all(torch.equal(tokens[number], expected[number]) for number in numbers):
                self._keep_outputs(writer, numbers, [free.outputs for _, free in parts], repeated)
                self._num_replaced += self._choices.num_replaced - before
            else:
                forced += numbers
        self._attach(writer, "tokens", tokens)
        if watch is not None:
            writer.attach_json(USAGE, watch.to_json())
        return tokens, forced

    def _force(
        self,
        writer: TraceWriter,
        tokens: list[Tensor],
        numbers: list[int],
        repeated: RepeatedWork,
    ) -> None:
        """Run the works of these numbers, whole batches, with the reference's tokens."""
        before = self._choices.num_replaced
        for _, of_batch in groupby(numbers, key=lambda number: self._works[number].source.batch):
            batch = list(of_batch)
            outputs = [
                run_forced(self._side, self._works[number], tokens[number]).outputs
                for number in batch
            ]
            self._keep_outputs(writer, batch, outputs, repeated)
        self._num_replaced += self._choices.num_replaced - before

    def _keep_outputs(
        self,
        writer: TraceWriter,
        numbers: Sequence[int],
        outputs: Sequence[Mapping[str, Tensor]],
        repeated: RepeatedWork,
    ) -> None:
        """Attach the outputs of all works of one batch. Raises: OutputError for others than the golden's."""
        for number, of_work in zip(numbers, outputs, strict=True):
            if of_work.keys() != set(self._section.outputs):
                expected = ", ".join(sorted(self._section.outputs))
                raise OutputError(
                    f"the model returned {', '.join(sorted(of_work))}, the reference {expected}"
                )
            repeated.offer(number, of_work)
        batch = self._works[numbers[0]].source.batch
        for name in self._section.outputs:
            attach_batch(writer, name, batch, torch.cat([of_work[name] for of_work in outputs]))

    def _score(self, writer: TraceWriter, tokens: list[Tensor]) -> None:
        """Compute the sampler's scores for the reference's logits."""
        if not self._section.golden.model.can_generate:
            return
        logits = self._expected("logits")
        sampling = self._section.golden.inputs.sampling
        scores = (
            processed_scores(self._side, work, forced, expected, sampling)
            for work, forced, expected in zip(self._works, tokens, logits, strict=True)
        )
        self._attach(writer, "scores", scores)

    def _replay(self, writer: TraceWriter, tokens: list[Tensor]) -> None:
        section, attention = self._section, attention_of(self._side.loaded)
        replayer = Replayer(
            section.steps, section.boundary, attention, section.pointwise(), section.score_noise()
        )
        watch = UsageWatch(replayer)
        tolerated = () if self._has_output else (OutputError,)
        results = replay(self._side, self._works, tokens, replayer, watch, tolerated=tolerated)
        self._absent_masks = results.absent_masks
        attach_results(writer, REPLAY, results)
        writer.attach_json(USAGE, watch.to_json())

    def _expected(self, name: str) -> list[Tensor]:
        """Return the golden's tensor for each work."""
        by_batch = {
            batch.number: tensor
            for batch, tensor in zip(
                self._section.batches, self._section.tensors(name), strict=True
            )
        }
        return [
            tensor if work.source.row is None else tensor[work.source.row : work.source.row + 1]
            for work in self._works
            for tensor in (by_batch[work.source.batch],)
        ]

    def _attach(self, writer: TraceWriter, name: str, tensors: Iterable[Tensor]) -> None:
        """Store the tensors of all works; rows of one batch are concatenated."""
        by_work = zip(self._works, tensors, strict=True)
        for batch, group in groupby(by_work, key=lambda pair: pair[0].source.batch):
            rows = [tensor for _, tensor in group]
            attach_batch(writer, name, batch, rows[0] if len(rows) == 1 else torch.cat(rows))


def _different_weights(section: GoldenSection, model: nn.Module) -> list[str]:
    expected = section.weights()
    actual = {unwrapped_path(name): value for name, value in weight_hashes(model).items()}
    return sorted(
        name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name)
    )


def _untied(section: GoldenSection, model: nn.Module) -> list[str]:
    """List parameters that are tied in the reference but not in the candidate."""
    expected, head = section.weights(), "lm_head.weight"
    named = model.named_parameters(remove_duplicate=False)
    ids = {unwrapped_path(name): id(parameter) for name, parameter in named}
    tied = [name for name in ids if name in expected and expected[name] == expected.get(head)]
    return [head] if head in tied and any(ids[name] != ids[head] for name in tied) else []
