"""The candidate process: run the model under test, and write its results.

It never judges, because a setup function may have patched anything in this process.
"""

import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor, nn

from assay.comparing.results import attach_results
from assay.devices.registry import describe_run
from assay.generate.passes.batch_attachments import attach_batch
from assay.generate.passes.choices import (
    RecordedChoices,
    ReplacedChoices,
    read_choice_noise,
)
from assay.generate.passes.generation_loop import OutputError, count_tokens
from assay.generate.passes.passes import (
    Repeatability,
    RepeatedWork,
    Side,
    accumulated_errors,
    replay,
    run_all_free,
    run_forced,
    single_rows,
    whole_batches,
)
from assay.generate.passes.sampler import processed_scores
from assay.generate.processes.candidate_model import compile_model, load, set_up, shard
from assay.generate.processes.golden_folder import GoldenSection, read_golden
from assay.generate.processes.options import CandidateOptions
from assay.generate.processes.requests import (
    REPLAY,
    USAGE,
    CandidateReport,
    CandidateRequest,
    GoldenManifest,
    OutputProblem,
)
from assay.hooks.module_tracer import NullHandler
from assay.hooks.usage import UsageWatch
from assay.launch import Rank
from assay.locating.matching.expert_routing import NearTieChoices
from assay.locating.modules import Replayer
from assay.models import weight_hashes
from assay.models.loaded.inspection import inspect_changes, inspect_load
from assay.models.loading.configs import attention_of
from assay.runs import Progress
from assay.runs.results import rank_folder
from assay.sites import JudgedLevel, unwrapped_path
from assay.trace import TraceWriter
from assay.verdicts import Outcome

_NAMES_SHOWN = 200
# Excludes the time of a setup function.
_NUM_PHASES = {"tokens": 5, "logits": 7, "modules": 9}


def run_candidate(
    request: CandidateRequest, progress: Progress, rank: Rank | None = None
) -> CandidateReport:
    """Run the candidate, or one rank of it, and write its results as a trace.

    The trace goes to `request.folder`; with several ranks, to a folder for each rank there.
    """
    golden = read_golden(Path(request.golden))
    run = request.candidate
    options = CandidateOptions.parse(request.options)
    section = GoldenSection.open(Path(request.golden), run.dtype)
    num_phases = _NUM_PHASES[request.level] + bool(request.setup)
    if request.level == "modules" and options.compile:
        num_phases -= 1  # how errors accumulate is measured by hooks, which break compiled graphs
    progress.number_phases(num_phases)
    with progress.step(f"loads {request.model} on {run}"):
        side = load(request, options, golden, rank)
    with progress.step("compares what is loaded with the files"):
        inspection = inspect_load(side.loaded, request.remote_code)
    if request.setup is not None:
        with progress.step(f"is set up by {request.setup}"):
            side = set_up(side, request.setup)
    with progress.step("compares the weights with the reference's"):
        different = _different_weights(section, side.loaded.model)
        dtype = getattr(torch, run.dtype)
        changes = inspect_changes(side.loaded.model, dtype, inspection, different)
        untied = _untied(section, side.loaded.model)
    side = compile_model(side if rank is None else shard(side, rank), options)
    loaded, device = side.loaded, side.device
    candidate = _Candidate(side, golden, section, request.level, options)
    folder = Path(request.folder)
    if rank is not None:
        folder = rank_folder(folder, rank.number)
    with TraceWriter(folder, {"run": str(run)}) as writer:
        repeatability = candidate.write(writer, progress)
    return CandidateReport(
        run=describe_run(device, run)
        | {
            "attention": attention_of(loaded),
            "setup": request.setup,
            "options": request.options,
        }
        | ({"mesh": request.mesh} if request.mesh else {}),
        deterministic=repeatability.identical,
        spread=repeatability.spread,
        weights_different=different[:_NAMES_SHOWN],
        load=inspection.report,
        changes=changes,
        untied=untied,
        problems=candidate.problems,
        notes=[*loaded.notes, *candidate.notes],
        peak_memory_bytes=device.peak_memory_bytes(),
    )


class _Candidate:
    def __init__(
        self,
        side: Side,
        golden: GoldenManifest,
        section: GoldenSection,
        level: JudgedLevel,
        options: CandidateOptions,
    ) -> None:
        self._choices = NearTieChoices(read_choice_noise(section.trace))
        recorded = RecordedChoices.read(section.trace, section.batches)
        if recorded.modules and not options.compile:  # compiled graphs cannot be changed
            side = replace(side, choices=ReplacedChoices(recorded, self._choices))
        self._side = side
        self._golden = golden
        self._section = section
        self._level = level
        self._num_replaced = 0
        self.problems: dict[str, OutputProblem] = {}
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
                f"near ties of a router: for {self._num_replaced} tokens the candidate chose another"
                " expert than the reference; the levels tokens and logits use the reference's choice"
            )
        if self._side.compiled and self._level == "modules":
            notes.append(
                "the level modules ran graphs that are split at module boundaries; the levels tokens"
                " and logits ran the graphs as compiled"
            )
        return notes

    def write(self, writer: TraceWriter, progress: Progress) -> Repeatability:
        """Make all passes, and measure the candidate's repeatability."""
        repeated = RepeatedWork(self._works)
        repeatability = Repeatability(identical=True, spread=0.0)
        num_tokens = count_tokens(work.batch for work in self._works)
        own: list[Tensor] = []
        forced: list[int] = []
        with progress.task("generates", num_tokens, "tokens"), self._noting("tokens"):
            own, forced = self._generate(writer, repeated)
        tokens = own
        if self._level != "tokens":
            tokens = self._expected("tokens")
            num_forced = count_tokens(self._works[number].batch for number in forced)
            with (
                progress.task("is given the reference's tokens", num_forced, "tokens"),
                self._noting("logits"),
            ):
                self._force(writer, tokens, forced, repeated)
            with progress.step("computes scores"), self._noting("sampler"):
                self._score(writer, tokens)
        with progress.task("runs again", repeated.num_tokens, "tokens"):
            if self._has_output:
                repeatability = repeated.run_again(self._side, tokens)
        if self._level == "modules":
            # Hooks break the graphs of compiled models.
            if not self._side.compiled and self._has_output:
                with progress.step("measures how errors accumulate"):
                    section = self._section
                    errors = accumulated_errors(self._side, section.batches[0], section.steps)
                    writer.attach_json("drift", errors)
            with progress.task("measures every module", num_tokens, "tokens"):
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
            self.problems[level] = OutputProblem(reason=reason, outcome=outcome)
            if level == "tokens":
                reason = f"no text to compare: {reason}"
                self.problems["logits"] = OutputProblem(reason=reason, outcome=Outcome.NOT_COMPARED)

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
        sampling = self._golden.inputs.sampling
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
                    repeated.offer(number, free.logits)
            elif all(torch.equal(tokens[number], expected[number]) for number in numbers):
                self._keep_logits(writer, numbers, [free.logits for _, free in parts], repeated)
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
            logits = [
                run_forced(self._side, self._works[number], tokens[number]).logits
                for number in batch
            ]
            self._keep_logits(writer, batch, logits, repeated)
        self._num_replaced += self._choices.num_replaced - before

    def _keep_logits(
        self,
        writer: TraceWriter,
        numbers: Sequence[int],
        logits: list[Tensor],
        repeated: RepeatedWork,
    ) -> None:
        """Attach the logits of all works of one batch."""
        for number, of_work in zip(numbers, logits, strict=True):
            repeated.offer(number, of_work)
        batch = self._works[numbers[0]].source.batch
        attach_batch(writer, "logits", batch, torch.cat(logits))

    def _score(self, writer: TraceWriter, tokens: list[Tensor]) -> None:
        """Compute the sampler's scores for the reference's logits."""
        if not self._golden.model.can_generate:
            return
        logits = self._expected("logits")
        sampling = self._golden.inputs.sampling
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
