"""Loads a checkpoint as its users do, with plain transformers and peft."""

import tempfile
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor

from assay.devices.run_string import parse_run
from assay.launch import Rank
from assay.models import load_model
from assay.models.saving import save_pretrained
from assay.training.processes.golden import Batches, plan_batches
from assay.training.trainers.reference import MODEL_FOLDER
from assay_smoke.cases.reference import logits_of, read_logits, relative_error
from assay_smoke.cases.requests import CaseRequest, ReadAnswer
from assay_smoke.cases.timeline import Timeline

# Folder next to `model` with the merged weights, if the trainer writes them.
MERGED_FOLDER = "merged"


def read(rank: Rank, request: CaseRequest) -> ReadAnswer:
    """Load the model of a checkpoint in a world of one rank and measure its logits."""
    timeline = Timeline(Path(request.timelines) / "rank-0.jsonl", rank.device)
    with timeline.phase("read"):
        try:
            return _read(request, rank)
        except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
            return ReadAnswer(problem=f"{type(error).__name__}: {error}")


def _read(request: CaseRequest, rank: Rank) -> ReadAnswer:
    options, checkpoint = request.candidate.options, Path(request.checkpoint)
    batches = plan_batches(options)
    folder = checkpoint / MODEL_FOLDER
    source = options.model if options.lora else str(folder)
    dtype = parse_run(request.candidate.candidate).dtype
    model = _loaded(source, dtype, rank)
    if options.lora:
        model = _with_adapter(model, folder)
    expected = read_logits(request.candidate.golden)
    error = relative_error(logits_of(model, batches, rank.device), expected)
    if not options.lora:
        return ReadAnswer(logits_error=error)
    return _read_adapter(request, folder, batches, rank).model_copy(update={"logits_error": error})


def _read_adapter(request: CaseRequest, folder: Path, batches: Batches, rank: Rank) -> ReadAnswer:
    """Measure the unmerged adapter and, if requested, the merged one, in float64."""
    with tempfile.TemporaryDirectory() as temporary:
        base, merged = Path(temporary) / "base", Path(temporary) / "merged"
        # Saved in float64 first: some models create buffers in the dtype of the loaded file.
        save_pretrained(_loaded(request.candidate.options.model, "float64", rank), base)
        model = _with_adapter(_loaded(str(base), "float64", rank), folder)

        def logits_of_model(one: Any) -> Tensor:  # noqa: ANN401 - transformers' or peft's
            return logits_of(one, batches, rank.device)

        unmerged = logits_of_model(model)
        with model.disable_adapter():
            effect = relative_error(unmerged, logits_of_model(model))
        if request.kind != "merged":
            return ReadAnswer(adapter_effect=effect)
        errors = {}
        model.merge_adapter()
        errors["merged into the weights"] = relative_error(logits_of_model(model), unmerged)
        model.unmerge_adapter()
        errors["merged and unmerged"] = relative_error(logits_of_model(model), unmerged)
        own_export = Path(request.checkpoint) / MERGED_FOLDER
        if not own_export.is_dir():
            own_export = merged
            save_pretrained(model.merge_and_unload(), merged)
        exported = logits_of_model(_loaded(str(own_export), "float64", rank))
        errors["merged, saved and loaded"] = relative_error(exported, unmerged)
        return ReadAnswer(adapter_effect=effect, merged_errors=errors)


def _loaded(source: str, dtype: str, rank: Rank) -> Any:  # noqa: ANN401 - transformers' model
    return load_model(source, dtype=dtype, device=rank.device.torch_device).model


def _with_adapter(model: Any, folder: Path) -> Any:  # noqa: ANN401 - peft's model
    from peft import PeftModel

    with warnings.catch_warnings():
        # peft uses the old name of an attribute of transformers.
        warnings.simplefilter("ignore", FutureWarning)
        return PeftModel.from_pretrained(model, folder).eval()
