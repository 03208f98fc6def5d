"""From a golden and a candidate's results to levels, location and verdict."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from assay.comparing.judge import Judged, find_origin, judge_replay, rank_stages
from assay.comparing.limits import Limits
from assay.comparing.results import ReplayResults
from assay.dtypes import float_format
from assay.generate.golden import GoldenSection
from assay.generate.logits import TokenMetrics, compare_logits, failure_rate, judge_logits
from assay.generate.requests import CandidateReport, GoldenManifest
from assay.generate.sampler import compare_scores
from assay.generate.tokens import FirstDifference, count_equal, first_differences
from assay.inputs import Batch
from assay.metrics import RowErrors
from assay.noise import Ratio
from assay.trace import Trace
from assay.verdicts import (
    Diagnosis,
    Level,
    Location,
    Measurement,
    Outcome,
    Suspect,
    TokenPosition,
    Unmatched,
    Verdict,
    overall_outcome,
)

_LISTED = 50


@dataclass
class Judgement:
    """A verdict under construction."""

    golden: GoldenManifest
    section: GoldenSection
    candidate: Trace
    report: CandidateReport
    limits: Limits
    levels: dict[str, Level] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ranked: list[Judged] = field(default_factory=list)
    near_ties: list[FirstDifference] = field(default_factory=list)
    first_bad: TokenPosition | None = None
    unmatched: Unmatched = field(default_factory=Unmatched)
    compared: int = 0

    def judge(self) -> Verdict:
        """All levels, then what they mean together."""
        self._judge_tokens_and_logits()
        self._judge_sampler()
        self._judge_modules()
        return self._conclude()

    def _batches(self, name: str, trace: Trace) -> list[Tensor]:
        stored = trace.attachment(name)
        return [stored[str(batch.number)] for batch in self.section.batches]

    def _judge_tokens_and_logits(self) -> None:
        expected = self._batches("logits", self.section.trace)
        noise = self._batches("noise-logits", self.section.trace)
        actual = self._batches("logits", self.candidate)
        if any(a.shape != e.shape for a, e in zip(actual, expected, strict=True)):
            reason = "the candidate's logits have another shape"
            self.levels["logits"] = Level(verdict=Outcome.NOT_COMPARED, reason=reason)
            return
        valid = [self._valid_tokens(batch, e) for batch, e in zip(self.section.batches, expected, strict=True)]
        metrics = _valid_metrics(actual, expected, valid)
        noise_metrics = _valid_metrics(noise, expected, valid)
        unit = float_format(self.section.trace.manifest["dtype"]).unit_roundoff
        ratios = judge_logits(metrics, noise_metrics, unit)
        failed = [ratio for ratio in ratios if ratio.value > self.limits.of(ratio.statistic)]
        worst = max(ratios, key=lambda ratio: ratio.value / self.limits.of(ratio.statistic))
        count = int(metrics.kl.numel())
        kl_limit = self.limits.of("logits-kl-worst") * ratios[-1].expected
        self.levels["logits"] = Level(
            verdict=_outcome(count, bool(failed)),
            compared=count,
            **_ratio_fields(worst, self.limits),  # type: ignore[arg-type]
            kl_mean=float(metrics.kl.mean()),
            kl_max=float(metrics.kl.amax()),
            top1_agreement=float(metrics.top1.mean()),
            top_k_agreement=float(metrics.top_k.mean()),
            cosine=float(metrics.cosine.amin()),
            max_difference=float(metrics.max_difference.amax()),
            failure_rate=failure_rate(metrics.kl, kl_limit),
            cross_entropy=float(metrics.cross_entropy.mean()),
            prob_mean=float(metrics.prob_mean.mean()),
            prob_std=float(metrics.prob_std.mean()),
            diff_mean=float(metrics.diff_mean.mean()),
        )
        self.compared += count
        addresses = self._token_addresses(valid)
        self._measure_logits(metrics, noise_metrics, addresses, ratios)
        if failed:
            self._note_first_bad(metrics, kl_limit, addresses)
        if self.golden.model.can_generate:
            self._judge_tokens(expected, noise)
        else:
            self.levels["tokens"] = Level(verdict=None, reason="the model does not generate")

    def _judge_tokens(self, expected_logits: Sequence[Tensor], noise: Sequence[Tensor]) -> None:
        limit = self.limits.of("logits-worst")
        expected = self._batches("tokens", self.section.trace)
        actual = self._batches("tokens", self.candidate)
        if self.golden.inputs.sampling.get("do_sample"):
            reason = "drawn at random: see the sampler level"
            self.levels["tokens"] = Level(verdict=None, reason=reason)
            return
        compared = equal = 0
        wrong: list[tuple[Batch, FirstDifference]] = []
        for batch, a, e, logits, n in zip(
            self.section.batches, actual, expected, expected_logits, noise, strict=True
        ):
            if a.shape != e.shape:
                reason = f"batch {batch.number}: {a.shape[1]} tokens instead of {e.shape[1]}"
                self.levels["tokens"] = Level(verdict=Outcome.FAIL, reason=reason)
                return
            compared += e.numel()
            equal += count_equal(a, e)
            for difference in first_differences(a, e, logits, n, limit):
                self._measure_first_difference(batch, difference)
                if difference.is_near_tie:
                    self.near_ties.append(difference)
                else:
                    wrong.append((batch, difference))
        self.levels["tokens"] = Level(
            verdict=_outcome(compared, bool(wrong)),
            compared=compared,
            equal=equal,  # type: ignore[call-arg]
            near_ties=len(self.near_ties),  # type: ignore[call-arg]
        )
        self.compared += compared
        if wrong and self.first_bad is None:
            batch, difference = min(wrong, key=lambda pair: pair[1].step)
            self.first_bad = TokenPosition(
                prompt=batch.prompts[difference.row],
                position=len(batch.rows[difference.row]) + difference.step,
                phase="decode",
            )

    def _judge_sampler(self) -> None:
        if not self.golden.model.can_generate:
            self.levels["sampler"] = Level(verdict=None, reason="the model does not generate")
            return
        differences = [
            compare_scores(a, e)
            for a, e in zip(
                self._batches("scores", self.candidate),
                self._batches("scores", self.section.trace),
                strict=True,
            )
        ]
        compared = sum(item.num_tokens for item in differences)
        self.levels["sampler"] = Level(
            verdict=_outcome(compared, not all(item.agrees for item in differences)),
            compared=compared,
            masked_differently=sum(item.num_masked_differently for item in differences),  # type: ignore[call-arg]
            largest_difference=max(item.largest for item in differences),  # type: ignore[call-arg]
        )
        self.compared += compared

    def _judge_modules(self) -> None:
        if self.golden.level != "modules":
            reason = f"the golden was captured at level {self.golden.level}"
            self.levels["inputs"] = Level(verdict=None, reason=reason)
            self.levels["modules"] = Level(verdict=None, reason=reason)
            return
        replay = ReplayResults.from_parts(
            self.candidate.attachment_json("replay"),  # type: ignore[arg-type]
            self.candidate.attachment("replay-sums"),
        )
        noise = self.section.noise()
        judged, bias = judge_replay(replay, noise, self.limits)
        if bias is not None:
            self.notes.append(
                f"all {bias.num_modules} matrix products shrink their results by about"
                f" {-bias.slope:.1e}: the device truncates sums. This is not counted as an error;"
                " an equal error in all of them would not be seen"
            )
        self.ranked = rank_stages(judged)
        self.unmatched = Unmatched(
            expected=replay.unmatched_expected[:_LISTED], actual=replay.unmatched_actual[:_LISTED]
        )
        if replay.covered:
            names = ", ".join(replay.covered[:5])
            self.notes.append(
                f"{len(replay.covered)} modules of the reference were not called here; they are"
                f" covered by the module that contains them: {names}"
            )
        for level, phase in (("inputs", "inputs"), ("modules", "forward")):
            part = [item for item in judged if item.port.stage.phase == phase]
            self.levels[level] = self._replay_level(part, self.unmatched if phase == "forward" else Unmatched())
        self._measure_replay(judged, noise)
        ties = sum(port.exact.num_near_ties for port in replay.ports.values())
        if ties:
            self.notes.append(
                f"{ties} routing choices differ where the scores are nearly equal; these rows are"
                " left out"
            )

    def _replay_level(self, judged: list[Judged], unmatched: Unmatched) -> Level:
        compared = len({(item.port.module, item.port.port) for item in judged})
        failed = [item for item in judged if item.failed]
        outcome = _outcome(compared, bool(failed))
        if outcome is Outcome.PASS and unmatched.expected:
            outcome = Outcome.NOT_COMPARED
        level = Level(verdict=outcome, compared=compared)
        if judged:
            worst = max(judged, key=lambda item: item.severity)
            resolution: dict[str, float] = {}
            for item in judged:
                if item.limit:
                    known = resolution.get(item.ratio.statistic, 0.0)
                    resolution[item.ratio.statistic] = max(known, item.resolution)
            level = Level(
                verdict=outcome,
                compared=compared,
                **_ratio_fields(worst.ratio, self.limits),  # type: ignore[arg-type]
                module=worst.port.stage.module,
                resolution=resolution,
            )
        self.compared += compared
        return level

    def _conclude(self) -> Verdict:
        outcomes = [level.verdict for level in self.levels.values() if level.verdict is not None]
        outcome = overall_outcome(outcomes)
        origin = find_origin(self.ranked)
        location = Location(**_place(origin)) if origin is not None else None
        if origin is None and self.levels["sampler"].verdict is Outcome.FAIL:
            location = Location(phase="sampler")
        if origin is not None and (bad := self._first_bad_row(origin)) is not None:
            self.first_bad = bad
        diagnosis = self._diagnose(outcome, origin)
        ratio, limit, statistic, resolution = self._deciding(origin)
        return Verdict(
            verdict=outcome,
            model=self.golden.model.model_dump(),
            reference=self.golden.reference
            | {"yardstick": self.golden.sections[self.section.trace.manifest["dtype"]].yardstick_dtype},
            candidate=self.report.run | {"deterministic": self.report.deterministic},
            levels=self.levels,
            first_bad_token=self.first_bad if outcome is Outcome.FAIL else None,
            location=location if outcome is Outcome.FAIL else None,
            suspects=[
                Suspect(
                    location=Location(**_place(item)),
                    statistic=item.ratio.statistic,
                    noise_ratio=item.ratio.value,
                    limit=item.limit,
                )
                for item in self.ranked[:_LISTED]
            ],
            diagnosis=diagnosis,
            notes=[*self.golden.notes, *self.report.notes, *self.notes],
            noise_ratio=ratio,
            limit=limit,
            statistic=statistic,
            resolution=resolution,
            compared=self.compared,
            unmatched=self.unmatched,
        )

    def _deciding(
        self, origin: Judged | None
    ) -> tuple[float | None, float | None, str | None, float | None]:
        """Ratio, limit, statistic and resolution of what decided, or of the closest call."""
        if origin is not None:
            return origin.ratio.value, origin.limit, origin.ratio.statistic, origin.resolution
        level = self.levels["modules"]
        if level.verdict is None or level.compared == 0:
            level = self.levels["logits"]
        extra = level.model_extra or {}
        resolution = extra.get("resolution")
        if isinstance(resolution, dict):
            resolution = resolution.get("replay-tensor")
        return extra.get("noise_ratio"), extra.get("limit"), extra.get("statistic"), resolution

    def _diagnose(self, outcome: Outcome, origin: Judged | None) -> Diagnosis | None:
        if outcome is Outcome.FAIL:
            return self._diagnose_failure(origin)
        if outcome is not Outcome.PASS:
            return None
        if self.report.weights_different:
            names = ", ".join(self.report.weights_different[:5])
            self.notes.append(f"weights differ from the reference's: {names}; within the limits")
            return "below-resolution"
        if self.near_ties:
            self.notes.append(
                f"{len(self.near_ties)} of the generated texts leave the reference's where two"
                " tokens are nearly tied: the gap is within the noise"
            )
            return "near-tie"
        return None

    def _diagnose_failure(self, origin: Judged | None) -> Diagnosis:
        dtype = self.section.trace.manifest["dtype"]
        if origin is not None and origin.ratio.statistic == "non-finite":
            return "non-finite"
        if origin is not None and origin.port.stage.phase == "inputs":
            return "inputs-differ"
        if not self.report.deterministic and self.golden.sections[dtype].reference_deterministic:
            return "nondeterminism"
        if origin is not None:
            module = origin.port.stage.module
            if any(name.rpartition(".")[0] == module for name in self.report.untied):
                return "untied-parameters"
            if any(name.rpartition(".")[0] == module for name in self.report.weights_different):
                return "weight-mismatch"
            return "module-error"
        if self.levels["sampler"].verdict is Outcome.FAIL:
            return "sampler"
        logits = self.levels.get("logits")
        if logits is not None and math.isnan(float((logits.model_extra or {}).get("kl_mean", 0.0))):
            return "non-finite"
        return "module-error"

    def _first_bad_row(self, origin: Judged) -> TokenPosition | None:
        rows = RowErrors.concatenate(origin.port.sums.rows)
        if rows.error.numel() == 0:
            prompt, position = origin.port.exact.first
            return self._token(prompt, position) if prompt >= 0 else None
        noise = self.section.noise().ports.get((origin.port.module, origin.port.port))
        worst = noise.sums.worst_row()[0] if noise is not None else 0.0
        unit = float_format(self.section.trace.manifest["dtype"]).unit_roundoff
        threshold = self.limits.of("replay-row") * max(worst, unit / 2)
        if origin.ratio.statistic in ("replay-slope", "replay-bins", "replay-channel", "replay-share"):
            threshold = 0.0  # the error is in every row; none is over a limit of its own
        bad = ~(rows.relative() <= threshold) & (rows.prompt >= 0) & (rows.position >= 0)
        candidates = bad.nonzero()[:, 0].tolist()
        if not candidates:
            return None
        first = min(candidates, key=lambda i: (int(rows.position[i]), int(rows.prompt[i])))
        return self._token(int(rows.prompt[first]), int(rows.position[first]))

    def _token(self, prompt: int, position: int) -> TokenPosition:
        length = self._prompt_lengths().get(prompt, 0)
        phase = "prefill" if position < length else "decode"
        return TokenPosition(prompt=prompt, position=position, phase=phase)

    def _prompt_lengths(self) -> dict[int, int]:
        return {
            prompt: len(row)
            for batch in self.section.batches
            for prompt, row in zip(batch.prompts, batch.rows, strict=True)
        }

    def _valid_tokens(self, batch: Batch, logits: Tensor) -> Tensor:
        """Which logits belong to tokens: all generated ones, or those that are no padding."""
        if self.golden.model.can_generate:
            return torch.ones(logits.shape[:2], dtype=torch.bool)
        return batch.attention_mask.bool()

    def _token_addresses(self, valid: list[Tensor]) -> list[tuple[int, int]]:
        """Prompt and position of every valid token, in the order of the flattened metrics."""
        addresses = []
        for batch, mask in zip(self.section.batches, valid, strict=True):
            for row, prompt in enumerate(batch.prompts):
                start = len(batch.rows[row]) if self.golden.model.can_generate else 0
                count = int(mask[row].sum())
                addresses += [(prompt, start + step) for step in range(count)]
        return addresses

    def _measure_logits(
        self,
        metrics: TokenMetrics,
        noise: TokenMetrics,
        addresses: list[tuple[int, int]],
        ratios: list[Ratio],
    ) -> None:
        for ratio in ratios:
            self.measurements.append(
                _row("logits", "", "logits", ratio, self.limits.of(ratio.statistic))
            )
        floor = max(ratios[2].expected, 1e-300)
        columns = {
            "kl": "kl", "top1-agreement": "top1", "max-abs": "max_difference",
            "cross_entropy": "cross_entropy", "prob_mean": "prob_mean", "prob_std": "prob_std",
            "diff_mean": "diff_mean",
        }  # fmt: skip
        for statistic, name in columns.items():
            actual, expected = getattr(metrics, name).tolist(), getattr(noise, name).tolist()
            for (prompt, position), a, e in zip(addresses, actual, expected, strict=True):
                ratio = a / max(e, floor) if statistic == "kl" else math.nan
                self.measurements.append(
                    Measurement(
                        level="logits", module="", port="logits", statistic=statistic, actual=a,
                        expected=e, ratio=ratio, prompt=prompt, position=position,
                    )
                )  # fmt: skip

    def _measure_first_difference(self, batch: Batch, difference: FirstDifference) -> None:
        self.measurements.append(
            Measurement(
                level="tokens", module="", port="tokens", statistic="first-difference",
                actual=difference.gap, expected=difference.noise,
                ratio=difference.gap / max(difference.noise, 1e-300), limit=difference.limit,
                prompt=batch.prompts[difference.row],
                position=len(batch.rows[difference.row]) + difference.step,
            )
        )  # fmt: skip

    def _measure_replay(self, judged: list[Judged], noise: ReplayResults) -> None:
        for item in judged:
            port = item.port
            level = "inputs" if port.stage.phase == "inputs" else "modules"
            row = _row(level, port.stage.module, _port_name(item), item.ratio, item.limit)
            self.measurements.append(
                row.model_copy(update={"phase": port.stage.phase, "order": port.order})
            )
        seen = set()
        for item in judged:
            key = (item.port.module, item.port.port)
            if key not in seen and item.port.sums.rows:
                seen.add(key)
                reference = noise.ports.get(key)
                self._measure_rows(item, reference.sums.rows if reference is not None else [])

    def _measure_rows(self, item: Judged, noise_rows: list[RowErrors]) -> None:
        actual = _by_token(RowErrors.concatenate(item.port.sums.rows))
        expected = _by_token(RowErrors.concatenate(noise_rows))
        unit = float_format(self.section.trace.manifest["dtype"]).unit_roundoff
        for (prompt, position), error in actual.items():
            noise = expected.get((prompt, position), 0.0)
            self.measurements.append(
                Measurement(
                    level="modules", module=item.port.stage.module, port=_port_name(item),
                    phase=item.port.stage.phase, order=item.port.order, statistic="token",
                    actual=error, expected=noise, ratio=error / max(noise, unit / 2),
                    prompt=prompt, position=position,
                )
            )  # fmt: skip

    def _note_first_bad(
        self, metrics: TokenMetrics, limit: float, addresses: list[tuple[int, int]]
    ) -> None:
        bad = (~(metrics.kl <= limit)).nonzero()[:, 0].tolist()
        if bad:
            first = min(bad, key=lambda index: (addresses[index][1], addresses[index][0]))
            self.first_bad = self._token(*addresses[first])


def _outcome(compared: int, failed: bool) -> Outcome:  # noqa: FBT001
    if compared == 0:
        return Outcome.NOT_COMPARED
    return Outcome.FAIL if failed else Outcome.PASS


def _ratio_fields(ratio: Ratio, limits: Limits) -> dict[str, Any]:
    return {
        "statistic": ratio.statistic,
        "noise_ratio": ratio.value,
        "limit": limits.of(ratio.statistic),
    }


def _valid_metrics(
    actual: Sequence[Tensor], expected: Sequence[Tensor], valid: Sequence[Tensor]
) -> TokenMetrics:
    parts = [compare_logits(a, e) for a, e in zip(actual, expected, strict=True)]
    names = TokenMetrics.__slots__
    return TokenMetrics(
        *(
            torch.cat([getattr(part, name)[mask] for part, mask in zip(parts, valid, strict=True)])
            for name in names
        )
    )


def _by_token(rows: RowErrors) -> dict[tuple[int, int], float]:
    """The worst relative error of each token."""
    worst: dict[tuple[int, int], float] = {}
    columns: Iterable[tuple[int, int, float]] = zip(
        rows.prompt.tolist(), rows.position.tolist(), rows.relative().tolist(), strict=True
    )
    for prompt, position, error in columns:
        known = worst.get((prompt, position))
        if prompt >= 0 and position >= 0 and (known is None or not error <= known):
            worst[prompt, position] = error
    return worst


def _place(item: Judged) -> dict[str, Any]:
    return {"phase": item.port.stage.phase, "module": item.port.stage.module}


def _port_name(item: Judged) -> str:
    """The port as seen from the stage that made it."""
    if item.port.module == item.port.stage.module:
        return item.port.port
    return f"{item.port.module}:{item.port.port}"


def _row(level: str, module: str, port: str, ratio: Ratio, limit: float) -> Measurement:
    return Measurement(
        level=level, module=module, port=port, statistic=ratio.statistic, actual=ratio.actual,
        expected=ratio.expected, ratio=ratio.value, limit=limit,
    )  # fmt: skip
