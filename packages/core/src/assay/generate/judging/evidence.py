"""The input of the judgement: a golden, a candidate's results, and the limits."""

from dataclasses import dataclass

from torch import Tensor

from assay.comparing.coverage import ComparedStages, CoverageParts, Usage, judge_coverage
from assay.comparing.levels import LevelResult
from assay.comparing.limits import Limits
from assay.comparing.results import read_results
from assay.dtypes import float_format
from assay.generate.passes.batch_attachments import attached_batches
from assay.generate.processes.golden_folder import GoldenSection
from assay.generate.processes.requests import REPLAY, USAGE, CandidateReport, GoldenManifest
from assay.sites import JudgedLevel
from assay.trace import Trace
from assay.verdicts import Coverage, Level, TokenPosition


@dataclass(frozen=True, slots=True)
class GenerateEvidence:
    """Both sides of a check, its limits and its level."""

    golden: GoldenManifest
    section: GoldenSection
    candidate: Trace
    report: CandidateReport
    limits: Limits
    depth: JudgedLevel = "modules"
    allow_unused: tuple[str, ...] = ()

    @property
    def dtype(self) -> str:
        """Return the dtype of candidate and noise run."""
        return str(self.section.trace.manifest["dtype"])

    @property
    def coverage(self) -> Coverage:
        """Judge how much of the model was compared."""
        candidate, stages = None, ComparedStages()
        if USAGE in self.candidate.attachments:
            candidate = Usage.model_validate(self.candidate.attachment_json(USAGE))
        if self.depth == "modules":
            results = read_results(self.candidate, REPLAY)
            stages = ComparedStages.of(self.section.noise(), [results])
        return judge_coverage(
            CoverageParts(self.section.usage(), candidate, stages, allowed=self.allow_unused)
        )

    @property
    def unit_roundoff(self) -> float:
        """Return the unit roundoff of `dtype`."""
        return float_format(self.dtype).unit_roundoff

    @property
    def reference_deterministic(self) -> bool:
        """Return True if two runs on the reference device were bitwise equal."""
        return self.golden.sections[self.dtype].reference_deterministic

    def problem(self, level: str) -> LevelResult | None:
        """Return the result of a level for which the candidate has no output."""
        problem = self.report.problems.get(level)
        if problem is None:
            return None
        return LevelResult(Level(verdict=problem.outcome, reason=problem.reason))

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
