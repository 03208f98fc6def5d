"""Refusal of goldens that do not fit a candidate: another model, other inputs, a lower level."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assay.errors import UsageError
from assay.generate.processes.input_plans import plan_inputs
from assay.generate.processes.requests import CandidateRequest, GoldenManifest
from assay.models import LoadedModel


def check_same_model(golden: GoldenManifest, loaded: LoadedModel) -> None:
    """Raise UsageError if the golden was made of another model."""
    for what, expected, actual in (
        ("weights", golden.model.weights_hash, loaded.weights_hash),
        ("tokenizer", golden.model.tokenizer_hash, loaded.tokenizer_hash),
    ):
        if expected != actual:
            raise UsageError(
                f"the golden is of another model: its {what} (of {golden.model.name}) have the"
                f" hash {expected}, those of {loaded.source.reference} have {actual}"
            )


def check_same_inputs(
    golden: GoldenManifest, loaded: LoadedModel, given: Mapping[str, Any]
) -> None:
    """Raise UsageError if the user's input options differ from the golden's."""
    wanted = golden.inputs.model_copy(update=dict(given))
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


def check_deep_enough(golden: GoldenManifest, request: CandidateRequest) -> None:
    """Raise UsageError if the golden was captured at a lower level than the check's."""
    if request.level == "modules" and golden.level != "module":
        raise UsageError(
            f"{request.golden} was captured at level {golden.level}, which says nothing of"
            f" {request.level}: check with --level {golden.level}, or capture it again"
        )
