"""The golden, a folder with the reference's recording, and the results of a candidate next to it.

A golden holds golden.json and a trace for each dtype. The trace holds the yardstick's calls. Its attachments are
the inputs, the yardstick's tokens and logits, and the measurements of the noise run in this dtype.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
import xxhash
from pydantic import Field
from torch import Tensor

from assay.dtypes import float_format
from assay.errors import UsageError, assay_command
from assay.files import read_json_object, refuse_link, require_numbers, validate_record
from assay.foreign_text import shorten
from assay.generate.spec import CandidateReport, GenerateCheck, InputOptions
from assay.hooks.tensors import Boundary
from assay.inputs import Batch, InputPlan
from assay.judge.coverage import ComparedStages, CoverageParts, Usage, judge_coverage
from assay.judge.levels import LevelResult
from assay.judge.limits import Limits, load_limits
from assay.judge.results import ReplayResults, read_results
from assay.models.inspect.report import LoadReport
from assay.replay.trace_views import StepwiseTrace
from assay.sites import RecordedLevel
from assay.trace import Trace, TraceError, TraceWriter
from assay.verdicts import Coverage, Record, TokenPosition

MANIFEST = "golden.json"
GOLDEN_SCHEMA = 4
# The output with the distribution of a token at every position.
LOGITS = "logits"
# Attachment that names the model's outputs, and the prefix of the noise run's.
OUTPUTS, NOISE_PREFIX = "outputs", "noise-"
# Attachments of measurements: of the noise run in a golden, of the candidate in its own trace.
NOISE, REPLAY = "noise", "replay"
# Attachment of the tensors that a processor made of images.
MEDIA = "media"
# Attachment of the reference's load report.
LOAD = "load"
# Attachment of the model usage, in a golden and in a candidate's trace.
USAGE = "usage"


class ModelIdentity(Record):
    """The model of a golden, identified by content."""

    name: str
    architecture: str
    weights_hash: str
    tokenizer_hash: str
    checkpoint_dtype: str
    vocab_size: int
    num_parameters: int
    max_positions: int | None = None
    can_generate: bool = True


class Section(Record):
    """The part of a golden for candidates in one dtype."""

    dtype: str
    yardstick_dtype: str
    reference_deterministic: bool
    num_calls: int = 0
    trace_digest: str = ""


class GoldenManifest(Record):
    """The content of golden.json."""

    schema_: int = Field(default=GOLDEN_SCHEMA, alias="schema")
    model: ModelIdentity
    reference: dict[str, Any]
    inputs: InputOptions
    inputs_hash: str
    level: RecordedLevel
    sections: dict[str, Section]
    notes: list[str] = Field(default_factory=list)
    environment: dict[str, Any] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)
    """Those of `record_settings`; older goldens have none."""
    digest: str = ""

    def content_hash(self) -> str:
        """Hash all fields but `digest`, and the settings only if there are any."""
        absent = {"digest"} if self.settings else {"digest", "settings"}
        text = self.model_dump_json(by_alias=True, exclude=absent)
        return xxhash.xxh3_128_hexdigest(text.encode())


@dataclass(frozen=True, slots=True)
class GoldenSection:
    """One dtype of a golden, opened."""

    golden: GoldenManifest
    dtype: str
    trace: Trace
    steps: StepwiseTrace
    """The recorded calls, one for each step of a generation."""
    batches: tuple[Batch, ...]
    boundary: Boundary

    @classmethod
    def open(cls, folder: Path, dtype: str) -> Self:
        """Open the part of the golden in `folder` that serves candidates in `dtype`.

        Raises: UsageError if it has none.
        """
        golden = read_golden(folder)
        if dtype not in golden.sections:
            raise UsageError(
                f"{folder} is for candidates in {', '.join(golden.sections)}, not in {dtype}. To capture one:"
                f" {renewal_command(golden.model_dump(by_alias=True) | {'sections': {dtype: None}})}"
            )
        trace = Trace.open(folder / dtype)
        tensors = trace.attachment(MEDIA) if MEDIA in trace.attachments else {}
        plan = InputPlan.from_json(trace.attachment_json("inputs"), tensors)  # type: ignore[arg-type]
        boundary = Boundary.exact_inputs_for(getattr(torch, dtype))
        return cls(golden, dtype, trace, StepwiseTrace.open(trace), plan.batches, boundary)

    @property
    def entry(self) -> Section:
        """Return the entry of this dtype in the manifest."""
        return self.golden.sections[self.dtype]

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the names of the model's outputs."""
        if OUTPUTS not in self.trace.attachments:
            return (LOGITS,)
        names: Any = self.trace.attachment_json(OUTPUTS)
        return tuple(names)

    def tensors(self, name: str) -> list[Tensor]:
        """Return the tensors called `name` of each batch: tokens, scores, an output, or noise-OUTPUT."""
        return attached_batches(self.trace, name, self.batches)

    def noise(self) -> ReplayResults:
        """Return the measurements of the noise run."""
        return read_results(self.trace, NOISE)

    def pointwise(self) -> frozenset[str]:
        """Return modules whose own code, in the noise run, only rounded element by element."""
        data: Any = self.trace.attachment_json(NOISE)
        return frozenset(port["stage"]["module"] for port in data["ports"] if port["pointwise"])

    def score_noise(self) -> dict[tuple[str, str], float]:
        """Return the root mean square error in the noise run, by module and port."""
        return {
            key: math.sqrt(port.sums.dd / port.sums.num_elements)
            for key, port in self.noise().ports.items()
            if port.sums.num_elements
        }

    def load(self) -> LoadReport:
        """Return the reference's load report."""
        return LoadReport.model_validate(self.trace.attachment_json(LOAD))

    def usage(self) -> Usage:
        """Return the parts of its model that the yardstick used."""
        return Usage.model_validate(self.trace.attachment_json(USAGE))

    def weights(self) -> dict[str, str]:
        """Return the hashes of the noise run's weights."""
        return dict(self.trace.attachment_json("weights"))  # type: ignore[arg-type]


def read_golden(folder: Path) -> GoldenManifest:
    """Read the manifest of the golden in `folder`.

    Raises: UsageError for a folder without a complete golden.
    """
    path = folder / MANIFEST
    if not path.is_file():
        begun = any(folder.glob("*/manifest.json")) if folder.is_dir() else False
        why = (
            f"it has no {MANIFEST}; it is of training, or its capture did not finish"
            if begun
            else f"it has no {MANIFEST}"
        )
        command = assay_command(
            "capture", "MODEL", run="RUN", noise_for="DTYPES", output="NEW.golden"
        )
        raise UsageError(f"{folder} is not a golden: {why}. To capture one: {command}")
    content = read_json_object(refuse_link(path))
    if (schema := content.get("schema")) != GOLDEN_SCHEMA:
        raise UsageError(
            f"{path}: schema {shorten(schema)}, this version of assay reads {GOLDEN_SCHEMA}: use the version"
            f" that captured it, or capture it again: {renewal_command(content)}"
        )
    return require_numbers(validate_record(GoldenManifest, content, path), path)


def renewal_command(manifest: Mapping[str, Any]) -> str:
    """Return the command that captures a golden again, from a manifest of any schema, or of unknown content."""

    def part(name: str) -> Mapping[str, Any]:
        found = manifest.get(name)
        return found if isinstance(found, dict) else {}

    defaults = InputOptions().model_dump()
    inputs = part("inputs")
    given = {
        name: inputs[name] for name in defaults if inputs.get(name) not in (None, defaults[name])
    }
    return assay_command(
        "capture",
        part("model").get("name") or "MODEL",
        run=part("reference").get("run") or "RUN",
        noise_for=",".join(map(str, part("sections"))) or "DTYPES",
        **(given | given.pop("sampling", {})),
        level="logits" if manifest.get("level") == "logits" else None,
        output="NEW.golden",
    )


def verify_golden(folder: Path, dtype: str) -> None:
    """Read the part of the golden in `folder` that serves `dtype`, and compare it with its hashes.

    Raises: UsageError with every damaged file, and as `GoldenSection.open`.
    """
    try:
        section = GoldenSection.open(folder, dtype)
    except TraceError as error:
        renewal = renewal_command(read_golden(folder).model_dump(by_alias=True))
        raise TraceError(f"{error} To capture it again: {renewal}") from None
    damage = [f"{dtype}/{line}" for line in section.trace.find_damage()]
    if section.golden.content_hash() != section.golden.digest:
        damage.insert(0, f"{MANIFEST}: its values")
    elif section.trace.digest != section.entry.trace_digest:
        damage.insert(0, f"{dtype}: all of it belongs to another golden")
    if damage:
        renewal = renewal_command(section.golden.model_dump(by_alias=True))
        advice = (
            f"Copy the golden again, use it unchecked (--no-verify), or capture it again: {renewal}"
        )
        raise TraceError.changed(folder, damage, advice)
    if NOISE in section.trace.attachments:
        section.noise()  # refuses sums of another version, before the candidate runs


# Tensors of each batch are an attachment each: it can be written as soon as it is computed.
_KEY = "values"


def attach_batch(writer: TraceWriter, name: str, number: int, tensor: Tensor) -> None:
    """Store the tensor of batch `number`. Raises: as `TraceWriter.attach`."""
    writer.attach(batch_attachment(name, number), {_KEY: tensor})


def attached_batches(trace: Trace, name: str, batches: Iterable[Batch]) -> list[Tensor]:
    """Return the tensor of each of `batches`, memory-mapped. Raises: as `Trace.attachment`."""
    return [trace.attachment(batch_attachment(name, batch.number))[_KEY] for batch in batches]


def batch_attachment(name: str, number: int) -> str:
    """Return the name of the attachment for batch `number`."""
    return f"{name}.{number}"


@dataclass(frozen=True)
class GenerateEvidence:
    """Both sides of a check, with its options."""

    check: GenerateCheck
    section: GoldenSection
    candidate: Trace
    report: CandidateReport
    original: Mapping[str, LevelResult] = field(default_factory=dict)
    """Levels of the comparison with the model before its quantization."""

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
        """Return the candidate's tensors of each batch: tokens, scores or an output."""
        return attached_batches(self.candidate, name, self.section.batches)

    def expected(self, name: str) -> list[Tensor]:
        """Return the golden's tensors of each batch: tokens, scores, an output, or noise-OUTPUT."""
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

    def longest_prompt(self, position: int) -> int:
        """Return the longest prompt of the first batch that reads a token at `position`."""
        for batch in self.section.batches:
            row = max(range(len(batch.rows)), key=lambda number: len(batch.rows[number]))
            if position < batch.first_new_position(row) + batch.max_new_tokens:
                return batch.prompts[row]
        return self.section.batches[0].prompts[0]

    def call_of(self, token: TokenPosition) -> tuple[int, int]:
        """Return batch and step of the forward call that read a token."""
        for batch in self.section.batches:
            if token.prompt in batch.prompts:
                row = batch.rows[batch.prompts.index(token.prompt)]
                column = token.position + batch.length - len(row)
                if batch.decoder_start:  # the encoder of a text reads it in a call of its own
                    step = column - batch.length + (batch.length > 0)
                    return batch.number, step if column >= batch.length else 0
                chunk = batch.prefill_chunk or max(batch.length, 1)
                if column < batch.length:
                    return batch.number, column // chunk
                num_calls = -(-batch.length // chunk) or 1  # images are read in one call
                return batch.number, num_calls + column - batch.length
        return self.section.batches[0].number, 0

    def call_of_module(self, module: str, token: TokenPosition) -> tuple[int, int]:
        """Return batch and step of the call of a module that made the values of a token.

        A tower of images is called once, before the tokens are read, and only for batches with images.
        """
        number, step = self.call_of(token)
        known = self._module_calls.get(module, {})
        media = {batch.number for batch in self.section.batches if batch.media}
        if not known or (number in known and number not in media):
            return number, step
        if number not in known:
            number = min(known)
        return number, step if step in known[number] else min(known[number])

    @cached_property
    def _module_calls(self) -> dict[str, dict[int, set[int]]]:
        """Return the steps in which the reference called each module, by module and batch."""
        found: dict[str, dict[int, set[int]]] = {}
        for call in self.section.trace.calls:
            site = call.site
            found.setdefault(site.module, {}).setdefault(site.micro_batch or 0, set()).add(
                site.step
            )
        return found
