"""From levels to one verdict: outcome, location, diagnosis. Of several ranks, the worst decides."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from assay.errors import name_some
from assay.generate.golden import GenerateEvidence
from assay.generate.module_levels import ModuleLevels, judge_module_levels, location_of
from assay.generate.output_levels import judge_outputs_level
from assay.generate.spec import CandidateReport
from assay.generate.text_levels import (
    judge_logits_level,
    judge_sampler_level,
    judge_tokens_level,
)
from assay.judge.coverage import notes_on_coverage
from assay.judge.levels import (
    Cause,
    DecidingNumbers,
    DiagnosedFault,
    LevelResult,
    conclude,
    deciding_numbers,
    find_worst,
    general_resolution,
    notes_of,
    rows_of,
)
from assay.judge.loaded import JudgedLoad, judge_load
from assay.judge.replays import FailedStage, Judged, list_suspects
from assay.verdicts import (
    Diagnosis,
    Location,
    Measurement,
    Outcome,
    Ratio,
    TokenPosition,
    Verdict,
)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, its measurements, and the input of the follow-up."""

    verdict: Verdict
    measurements: list[Measurement]
    failed: list[Judged]
    """Every statistic of a stage over its limit."""
    origin: FailedStage | None
    """The stage where the error arises."""
    call: tuple[int, int] | None = None
    """Batch and step that show the error first."""
    load: JudgedLoad | None = None

    def with_note(self, note: str) -> "Judgement":
        """Add a note to the verdict."""
        return self._with(notes=[*self.verdict.notes, note])

    def with_operation(self, name: str) -> "Judgement":
        """Name the operation at the location of the verdict, which is one of the suspects too."""
        known = self.verdict.location
        if known is None:
            return self
        location = known.model_copy(update={"op": name})
        suspects = [
            one.model_copy(update={"location": location}) if one.location == known else one
            for one in self.verdict.suspects
        ]
        return self._with(location=location, suspects=suspects)

    def _with(self, **fields: object) -> "Judgement":
        return replace(self, verdict=self.verdict.model_copy(update=fields))


@dataclass(frozen=True, slots=True)
class _Signature:
    """The form of a failure."""

    evidence: GenerateEvidence
    results: dict[str, LevelResult]
    origin: FailedStage | None

    @property
    def is_not_finite(self) -> bool:
        if self.origin is None:
            return _is_not_finite(self.results)
        return self.origin.reported.statistic == "non-finite"

    @property
    def is_of_sampler(self) -> bool:
        fails = self.results["sampler"].level.verdict is Outcome.FAIL
        return self.origin is None and (fails or _stops_elsewhere(self.results))

    @property
    def only_candidate_varies(self) -> bool:
        report = self.evidence.report
        return (
            not report.deterministic
            and self.evidence.section.entry.reference_deterministic
            and _varies_beyond_noise(report.spread, _output_ratios(self.results))
        )

    def owns(self, parameters: list[str]) -> bool:
        """Return True if the module itself owns one of them."""
        return self.origin is not None and bool(
            _parameters_of(self.origin.stage.module, parameters)
        )


# The first that applies is the diagnosis.
_RULES: tuple[tuple[Diagnosis, Callable[[_Signature], bool]], ...] = (
    ("non-finite", lambda s: s.is_not_finite),
    ("sampler", lambda s: s.is_of_sampler),
    ("inputs-differ", lambda s: s.origin is not None and s.origin.stage.phase == "inputs"),
    ("nondeterminism", lambda s: s.only_candidate_varies),
    ("untied-parameters", lambda s: s.owns(s.evidence.report.untied)),
    ("weight-mismatch", lambda s: s.owns(s.evidence.report.weights_different)),
    ("module-error", lambda _: True),
)


def judge_generation(evidence: GenerateEvidence) -> Judgement:
    """Judge all levels, and derive outcome, location and diagnosis."""
    load_reports = [evidence.section.load()]
    load_reports += [] if evidence.report.load is None else [evidence.report.load]
    load = judge_load(load_reports, [evidence.report.changes])
    replay = judge_module_levels(evidence)
    logits = judge_logits_level(evidence)
    logits_agree = logits.level.verdict is not Outcome.FAIL
    outputs = judge_outputs_level(evidence)
    results = {
        "load": load.result,
        **evidence.original,
        "inputs": replay.inputs,
        "tokens": judge_tokens_level(evidence, logits_agree=logits_agree),
        "logits": logits,
        **({} if outputs is None else {"outputs": outputs}),
        "modules": replay.modules,
        "sampler": judge_sampler_level(evidence),
    }
    origin = replay.origin
    if origin is None and _is_not_finite(results):
        origin = replay.nonfinite_padding
    coverage = evidence.coverage
    notes = list(dict.fromkeys([*evidence.golden.notes, *evidence.report.notes]))
    notes += [*notes_of(results), *notes_on_coverage(coverage)]
    found: Cause | DiagnosedFault | None = _find_in_load(load, origin)
    stored = next((one for one in evidence.original.values() if one.is_failed), None)
    if found is None and stored is not None:
        found = stored.cause
    if load.loading:
        origin = None  # later failures are consequences
    if origin is not None and origin is replay.nonfinite_padding:
        notes.append(
            f"{origin.stage} writes NaN or infinity into padding; what attends to padding, with"
            " weight zero, is NaN as well"
        )
    if not evidence.report.deterministic:
        notes.append(
            f"two runs of the candidate differ by {evidence.report.spread:.1e} of the logits"
        )
    has_failed = any(one.is_failed for one in results.values())
    first_bad = _first_bad_token(results, replay) if has_failed else None
    call = None
    if first_bad is not None and origin is not None:
        read = replay.modules.first_bad
        if read is None:  # a new token, whose logits are those of the token before it
            read = evidence.token(first_bad.prompt, max(0, first_bad.position - 1))
        call = evidence.call_of_module(origin.stage.module, read)
    signature = _Signature(evidence, results, origin)
    diagnosis = next(diagnosis for diagnosis, applies in _RULES if applies(signature))
    cause = found or Cause(diagnosis, _location(signature, call))
    named = None
    if found is None and origin is not None and has_failed and cause.location is not None:
        named = cause.location, origin.reported
    verdict = conclude(
        results,
        cause,
        notes=notes,
        coverage=coverage,
        different_weights=evidence.report.weights_different,
        model=evidence.golden.model.model_dump() | {"name": evidence.check.model},
        reference=evidence.golden.reference | {"yardstick": evidence.section.entry.yardstick_dtype},
        candidate=evidence.report.run | {"deterministic": evidence.report.deterministic},
        first_bad_token=first_bad,
        suspects=list_suspects(
            replay.ranked,
            lambda stage: location_of(stage).model_copy(update={"step": replay.steps[stage.stage]}),
            named,
        ),
        unmatched=replay.unmatched,
        headline=stored.level.reason if stored is not None and found is stored.cause else None,
        **({} if found else _decide_numbers(results, origin if has_failed else None)),
    )
    return Judgement(verdict, rows_of(results), replay.failed, origin, call, load)


def _find_in_load(load: JudgedLoad, origin: FailedStage | None) -> DiagnosedFault | None:
    """Return the first loading error; without a failed stage, the first changed weight.

    A failed stage locates a changed weight better.
    """
    if load.loading:
        return load.loading[0]
    return load.changed[0] if load.changed and origin is None else None


def _location(signature: _Signature, call: tuple[int, int] | None) -> Location | None:
    origin = signature.origin
    if origin is None:
        return Location(phase="sampler") if signature.is_of_sampler else None
    # The error may be in decode steps only: name the first call that shows it.
    step = call[1] if call is not None else 0
    location = location_of(origin).model_copy(update={"step": step})
    if origin.stage.phase != "forward":
        return location
    different = signature.evidence.report.weights_different
    named = _parameters_of(origin.stage.module, different)
    return location.model_copy(update={"parameter": named[0] if named else None})


def _first_bad_token(results: dict[str, LevelResult], replay: ModuleLevels) -> TokenPosition | None:
    if replay.origin is not None and replay.modules.first_bad is not None:
        return replay.modules.first_bad
    found = (results[name].first_bad for name in ("logits", "outputs", "tokens") if name in results)
    return next((token for token in found if token is not None), None)


def _decide_numbers(results: dict[str, LevelResult], origin: FailedStage | None) -> DecidingNumbers:
    """Return the numbers that decided the verdict, or those closest to their limit."""
    if origin is not None:
        return deciding_numbers(origin.reported, origin.reported.resolution)
    outputs = [name for name in ("logits", "outputs") if name in results]
    wrong = [name for name in outputs if results[name].level.verdict is Outcome.FAIL]
    known = [name for name in ("modules", *outputs) if results[name].level.compared]
    name = (wrong or known or ["logits"])[0]
    judged = results[name].judged
    if not judged:
        return {}
    return deciding_numbers(find_worst(judged), general_resolution(judged))


def _output_ratios(results: dict[str, LevelResult]) -> list[Ratio]:
    """Return the ratios of all outputs, logits first."""
    return [
        one for name in ("logits", "outputs") if name in results for one in results[name].judged
    ]


def _varies_beyond_noise(spread: float, outputs: Sequence[Ratio]) -> bool:
    """Return True if repeated runs differ by more than the limit of an output's error.

    Smaller differences do not explain a failure: compiled and parallel models may change the order
    of sums between runs.
    """
    wanted = ("logits-error", "output-error")
    error = next((item for item in outputs if item.statistic in wanted), None)
    # Written so that NaN counts as variation.
    return error is None or not spread <= error.limit * error.expected


def _stops_elsewhere(results: dict[str, LevelResult]) -> bool:
    """Return True if the number of tokens differs: the loop ended at another one."""
    tokens = results["tokens"].level
    return tokens.verdict is Outcome.FAIL and tokens.reason is not None


def _is_not_finite(results: dict[str, LevelResult]) -> bool:
    """Return True if an output of the candidate holds NaN or infinity."""
    return any(math.isnan(one.actual) for one in _output_ratios(results))


def _parameters_of(module: str, parameters: list[str]) -> list[str]:
    """Return the `parameters` that `module` itself owns."""
    return [name for name in parameters if name.rpartition(".")[0] == module]


# Facts about a rank's own weights, which explain the results of all ranks.
_WEIGHT_FACTS = ("weights_different", "untied")


def merge_weight_facts(reports: Sequence[CandidateReport]) -> list[CandidateReport]:
    """Give each report the weight facts of all ranks."""
    merged = {
        name: sorted({fact for report in reports for fact in getattr(report, name)})
        for name in _WEIGHT_FACTS
    }
    return [report.model_copy(update=merged) for report in reports]


def worst_of_ranks(judgements: Sequence[Judgement]) -> Judgement:
    """Return the judgement of the worst rank, with a note on the ranks with the same outcome.

    judgements: by rank. The location names the rank unless all ranks have it: sharded values are gathered
    before they are measured, so an error in them appears on all ranks.
    """
    number = max(range(len(judgements)), key=lambda rank: _badness(judgements[rank]))
    worst = judgements[number]
    outcome = worst.verdict.verdict
    alike = [rank for rank, one in enumerate(judgements) if one.verdict.verdict is outcome]
    note = f"each of {len(judgements)} ranks is judged; {outcome.value}: "
    note += "all" if len(alike) == len(judgements) else f"rank {name_some([*map(str, alike)])}"
    update: dict[str, object] = {"notes": [*worst.verdict.notes, note]}
    location = worst.verdict.location
    if location is not None and any(one.verdict.location != location for one in judgements):
        update["location"] = location.model_copy(update={"rank": number})
    measurements = [row.model_copy(update={"rank": number}) for row in worst.measurements]
    return replace(
        worst, verdict=worst.verdict.model_copy(update=update), measurements=measurements
    )


def _badness(judgement: Judgement) -> tuple[int, bool, float]:
    """Return a sort key: the outcome, then a known place, then the ratio over its limit.

    An error of one rank reaches the logits of all, where its ratio may be larger than at its place.
    """
    verdict = judgement.verdict
    ratio = verdict.noise_ratio / verdict.limit if verdict.noise_ratio and verdict.limit else 0.0
    # Written so that NaN, which max() would ignore, is the worst.
    is_placed = verdict.location is not None
    return verdict.verdict.severity, is_placed, ratio if ratio >= 0 else float("inf")
