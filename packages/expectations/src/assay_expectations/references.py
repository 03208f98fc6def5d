"""The processes that explain an observation: the yardstick of this environment, with the setup function, and restored.

Shapes: B rows, N stored tokens of a row.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from assay.devices.run_string import Run, parse_run
from assay.errors import UsageError
from assay.files import read_json_object
from assay.generate.passes import Side
from assay.inputs import Batch
from assay.models.config_files import (
    can_move_outputs,
    first_line,
    list_setting_changes,
    record_settings,
    restore_settings,
)
from assay.models.sources import local_folder, resolve_model
from assay.runs import Progress
from assay.watchdog import temporary_folder
from assay_expectations.explaining import has_moved
from assay_expectations.observing import (
    HOST,
    Candidate,
    after_setup,
    captured_on_host,
    distributions_of,
    find_model,
    open_candidate,
    open_yardstick,
    recorded_tokens,
    run_rows,
    with_inputs,
)
from assay_expectations.projections import layer_errors, pool_sketches, sketch_layers
from assay_expectations.records import (
    Exact,
    Expectation,
    Reference,
    ReferenceRequest,
    Signature,
    VerifyRequest,
    read_expectation,
)


def observe_references(request: ReferenceRequest, progress: Progress) -> list[Reference]:
    """Run what explains observations, in a process that no setup function has patched."""
    run = parse_run(request.run)
    found = []
    with progress.task("running the references", len(request.sketches), "expectations") as task:
        for file, sketches in request.sketches.items():
            expectation = read_expectation(Path(file))
            model, candidate = _open_recorded(expectation, file, run, request.model)
            is_own = not request.is_patched
            found.append(_observe_reference(model, candidate, expectation, sketches, is_own=is_own))
            task.advance()
    return found


def observe_setups(request: VerifyRequest, progress: Progress) -> list[Exact | str]:
    """Run the yardsticks of models after the setup function, in a process that it may patch.

    Returns: outputs, or the reason why a model does not run.
    """
    run = parse_run(f"{HOST}/{parse_run(request.run).dtype}")
    found: list[Exact | str] = []
    with progress.task("running with the setup function", len(request.files)) as task:
        for file in request.files:
            expectation = read_expectation(Path(file))
            try:
                found.append(_observe_setup(expectation, run, request, file))
            except Exception as error:  # noqa: BLE001 - of the setup function, which expects another device
                found.append(first_line(error))
            task.advance()
    return found


def _observe_setup(expectation: Expectation, run: Run, request: VerifyRequest, file: str) -> Exact:
    model, candidate = _open_recorded(expectation, file, run, request.model)
    yardstick = replace(candidate, side=open_yardstick(model, candidate))
    side = after_setup(yardstick, str(request.setup)).side
    return _observe_exact(side, candidate.plan.batches, expectation.signature)


def _open_recorded(
    expectation: Expectation, file: str, run: Run, place: str | None
) -> tuple[str, Candidate]:
    """Open the model of the expectation in `file` with its inputs. place: the model to load instead of the recorded one."""
    model = place or find_model(expectation.model, Path(file))
    settings, prompts = expectation.key.content.settings, expectation.prompts or None
    candidate = open_candidate(model, run, settings, prompts)
    return model, with_inputs(candidate, expectation.inputs)


def _observe_exact(side: Side, batches: Sequence[Batch], signature: Signature) -> Exact:
    """Run a yardstick on the tokens of `signature`."""
    tokens, top_ids = recorded_tokens(signature)
    exactly, _ = run_rows(side, batches, tokens)
    layers = pool_sketches(sketch_layers(side, batches, tokens))
    return Exact(yardstick=distributions_of(exactly, top_ids), exact_layers=layers)


def _observe_restored(model: str, candidate: Candidate, expectation: Expectation) -> Exact | None:
    """Run the yardstick with the recorded config.json, if it has changed."""
    changes = list_setting_changes(expectation.config, record_settings(model))
    if not any(map(can_move_outputs, changes)):
        return None
    with local_folder(resolve_model(model), "refuse") as folder:
        values = read_json_object(folder / "config.json")
    if not restore_settings(values, expectation.config):
        return None
    with temporary_folder("assay-config-") as scratch:
        (scratch / "config.json").write_text(json.dumps(values), encoding="utf-8")
        try:
            yardstick = open_yardstick(model, candidate, scratch)
        except UsageError:  # the code of today may refuse a setting of the capture
            return None
    return _observe_exact(yardstick, candidate.plan.batches, expectation.signature)


def _observe_reference(
    model: str,
    candidate: Candidate,
    expectation: Expectation,
    sketches: Mapping[str, Sequence[Any]],
    *,
    is_own: bool,
) -> Reference:
    """Run the yardstick; where it moves or the run is over a limit, also what tells the cause.

    sketches: of the observed run, which is the candidate's if `is_own`; empty for a run within the limits.
    """
    batches, signature = candidate.plan.batches, expectation.signature
    yardstick = open_yardstick(model, candidate)
    tokens, top_ids = recorded_tokens(signature)
    exactly, _ = run_rows(yardstick, batches, tokens)
    dtype, exact = yardstick.loaded.dtype, distributions_of(exactly, top_ids)
    reference = Reference(yardstick=exact, yardstick_dtype=dtype)
    if not (sketches or has_moved(signature, exact, dtype)):
        return reference
    exact_layers = sketch_layers(yardstick, batches, tokens)
    update: dict[str, Any] = {
        "exact_layers": pool_sketches(exact_layers),
        "restored": _observe_restored(model, candidate, expectation),
    }
    if sketches:
        actual = {name: [torch.from_numpy(call) for call in of] for name, of in sketches.items()}
        update["layers"] = layer_errors(exact_layers, actual)
        update["on_host"] = captured_on_host(model, candidate, signature, is_host=is_own)
    return reference.model_copy(update=update)
