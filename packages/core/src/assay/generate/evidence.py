"""The input of the judgement: the options of a check, a golden, and a candidate's results."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from assay.comparing.coverage import ComparedStages, CoverageParts, Usage, judge_coverage
from assay.comparing.levels import LevelResult
from assay.comparing.limits import Limits, load_limits
from assay.comparing.results import ReplayResults, read_results
from assay.dtypes import float_format
from assay.generate.golden import REPLAY, USAGE, GoldenManifest, GoldenSection, attached_batches
from assay.generate.spec import CandidateReport, GenerateCheck
from assay.trace import Trace
from assay.verdicts import Coverage, TokenPosition


@dataclass(frozen=True)
class GenerateEvidence:
    """Both sides of a check, with its options."""

    check: GenerateCheck
    section: GoldenSection
    candidate: Trace
    report: CandidateReport

    @property
    def golden(self) -> GoldenManifest:
        """Return the manifest of the golden."""
        return self.section.golden

    @cached_property
    def limits(self) -> Limits:
        """Return the limits of the check."""
        return load_limits(self.check.limits)

    @cached_property
    def replay(self) -> ReplayResults:
        """Return the candidate's measurements of every module."""
        return read_results(self.candidate, REPLAY)

    @cached_property
    def noise(self) -> ReplayResults:
        """Return the noise run's measurements of every module."""
        return self.section.noise()

    @property
    def coverage(self) -> Coverage:
        """Judge how much of the model was compared."""
        candidate, stages = None, ComparedStages()
        if USAGE in self.candidate.attachments:
            candidate = Usage.model_validate(self.candidate.attachment_json(USAGE))
        if self.check.level == "modules":
            stages = ComparedStages.of(self.noise, [self.replay])
        allowed = self.check.allow_unused
        return judge_coverage(CoverageParts(self.section.usage(), candidate, stages, (), allowed))

    @property
    def unit_roundoff(self) -> float:
        """Return the unit roundoff of candidate and noise run."""
        return float_format(self.section.dtype).unit_roundoff

    def problem(self, level: str) -> LevelResult | None:
        """Return the result of a level for which the candidate has no output."""
        problem = self.report.problems.get(level)
        return None if problem is None else LevelResult(problem)

    def actual(self, name: str) -> list[Tensor]:
        """Return the candidate's tensors of each batch: tokens, logits, scores."""
        return attached_batches(self.candidate, name, self.section.batches)

    def expected(self, name: str) -> list[Tensor]:
        """Return the golden's tensors of each batch: tokens, logits, noise-logits, scores."""
        return self.section.tensors(name)

    def token(self, prompt: int, position: int) -> TokenPosition:
        """Return the position of a token, with its phase."""
        lengths = {
            number: len(row)
            for batch in self.section.batches
            for number, row in zip(batch.prompts, batch.rows, strict=True)
        }
        in_prompt = position < lengths.get(prompt, 0)
        return TokenPosition(
            prompt=prompt, position=position, phase="prefill" if in_prompt else "decode"
        )

    def call_of(self, token: TokenPosition) -> tuple[int, int]:
        """Return batch and step of the forward call that read a token."""
        for batch in self.section.batches:
            if token.prompt in batch.prompts:
                row = batch.rows[batch.prompts.index(token.prompt)]
                column = token.position + batch.length - len(row)
                chunk = batch.prefill_chunk or batch.length
                if column < batch.length:
                    return batch.number, column // chunk
                return batch.number, -(-batch.length // chunk) + column - batch.length
        return self.section.batches[0].number, 0
