"""Read the folder of a golden, and verify its content hashes.

A golden has `golden.json` and one trace for each candidate dtype. The trace holds the yardstick's
calls. Its attachments are the inputs, the yardstick's tokens and logits, and the measurements of the
noise run in this dtype.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from assay.comparing.coverage import Usage
from assay.comparing.results import ReplayResults, read_results
from assay.errors import UsageError
from assay.files import (
    read_json_object,
    refuse_link,
    validate_record,
)
from assay.foreign_text import shorten
from assay.generate.passes.batch_attachments import attached_batches
from assay.generate.processes.requests import GOLDEN_SCHEMA, LOAD, NOISE, USAGE, GoldenManifest
from assay.hooks.values.boundary import Boundary
from assay.inputs import Batch, InputPlan
from assay.locating.matching.stepwise_trace import StepwiseTrace
from assay.models.loaded.report import LoadReport
from assay.trace import Trace, TraceError

MANIFEST = "golden.json"
_ADVICE = "Copy the golden again, or capture it again. --no-verify uses it unchecked"


@dataclass(frozen=True, slots=True)
class GoldenSection:
    """One dtype of a golden, opened."""

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
        sections = read_golden(folder).sections
        if dtype not in sections:
            raise UsageError(
                f"{folder} is for candidates in {', '.join(sections)}, not in {dtype}: capture one"
                f" with --noise-for {dtype}"
            )
        trace = Trace.open(folder / dtype)
        plan = InputPlan.from_json(trace.attachment_json("inputs"))  # type: ignore[arg-type]
        boundary = Boundary.exact_inputs_for(getattr(torch, dtype))
        return cls(trace, StepwiseTrace.open(trace), plan.batches, boundary)

    def tensors(self, name: str) -> list[Tensor]:
        """Return the tensors called `name` of each batch: tokens, logits, noise-logits, scores."""
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

    Raises: UsageError if there is no complete golden.
    """
    path = folder / MANIFEST
    if not path.is_file():
        begun = any(folder.glob("*/manifest.json")) if folder.is_dir() else False
        why = "its capture did not finish" if begun else f"it has no {MANIFEST}"
        raise UsageError(f"{folder} is not a golden: {why}")
    content = read_json_object(refuse_link(path))
    if (schema := content.get("schema")) != GOLDEN_SCHEMA:
        raise UsageError(
            f"{path}: schema {shorten(schema)}, this version of assay reads {GOLDEN_SCHEMA}: capture"
            " the golden again, or use the version that captured it"
        )
    return validate_record(GoldenManifest, content, path)


def verify_golden(folder: Path, dtype: str) -> None:
    """Read the part of the golden in `folder` that serves `dtype`, and compare it with its hashes.

    Raises: UsageError with every damaged file, and as `GoldenSection.open`.
    """
    manifest = read_golden(folder)
    trace = GoldenSection.open(folder, dtype).trace
    damage = [f"{dtype}/{line}" for line in trace.find_damage()]
    if manifest.content_hash() != manifest.digest:
        damage.insert(0, f"{MANIFEST}: its values")
    elif trace.digest != manifest.sections[dtype].trace_digest:
        damage.insert(0, f"{dtype}: all of it belongs to another golden")
    if damage:
        raise TraceError.changed(folder, damage, _ADVICE)
