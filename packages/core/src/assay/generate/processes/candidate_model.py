"""The candidate's model: loaded, set up, sharded and compiled."""

import inspect
from contextlib import suppress
from dataclasses import replace
from typing import Any

from assay.devices.registry import open_run
from assay.errors import UsageError
from assay.generate.passes.passes import Side
from assay.generate.processes.fitting_golden import (
    check_deep_enough,
    check_same_inputs,
    check_same_model,
)
from assay.generate.processes.options import CandidateOptions
from assay.generate.processes.requests import CandidateRequest, GoldenManifest
from assay.launch import Rank
from assay.models import candidate_setup, load_model
from assay.models.loading.configs import first_line
from assay.models.loading.loaded_model import load_outline
from assay.models.size import choose_threads
from assay.parallel.tensor_parallel.decoder import apply_tensor_parallel
from assay.parallel.tensor_parallel.division import share_heads
from assay.parallel.tensor_parallel.rank_boundaries import RankBoundaries
from assay.plugins import load_object
from assay.runs import Progress


def check_candidate(request: CandidateRequest, progress: Progress) -> None:
    """Read setup function, configuration and options, so that a mistake costs no reference run.

    Raises: UsageError for what `load_candidate` would refuse later.
    """
    if request.setup is not None:
        function = load_object(request.setup)
        with suppress(ValueError):  # a function of C code has no signature
            signature = inspect.signature(function)
            try:
                signature.bind(None)
            except TypeError as error:
                raise UsageError(
                    f"{request.setup}{signature} cannot be called with the model alone: {error}"
                ) from None
    options = CandidateOptions.parse(request.options)
    chosen = {"attention": options.attention, "experts": options.experts}
    given = {name: value for name, value in chosen.items() if value is not None}
    if not given and not request.mesh:
        return
    with progress.step(f"reads the configuration of {request.model}"):
        try:
            outline = load_outline(request.model, request.remote_code)
        except Exception:  # noqa: BLE001 - code of the model, without values
            return
        if request.mesh:
            config: Any = outline.model.config
            share_heads(config.num_attention_heads, config.num_key_value_heads, request.mesh["tp"])
        for name, value in given.items():
            try:
                load_outline(request.model, request.remote_code, **{name: value})
            except Exception as error:
                message = f"candidate option {name}={value}: {first_line(error)}"
                raise UsageError(message) from error


def load_candidate(
    request: CandidateRequest, golden: GoldenManifest, rank: Rank | None = None
) -> Side:
    """Load, set up, shard for `rank` and compile the candidate's model."""
    options = CandidateOptions.parse(request.options)
    side = set_up(load(request, options, golden, rank), request.setup)
    return compile_model(side if rank is None else shard(side, rank), options)


def load(
    request: CandidateRequest,
    options: CandidateOptions,
    golden: GoldenManifest,
    rank: Rank | None = None,
) -> Side:
    """Load the candidate's model on its device."""
    check_deep_enough(golden, request)
    if rank is None:
        device = open_run(request.candidate)
        choose_threads(golden.model.num_parameters)
    else:
        device = rank.device
    options.apply_to_process()
    loaded = load_model(
        request.model,
        dtype=request.candidate.dtype,
        device=device.torch_device,
        attention=options.attention,
        experts=options.experts,
        remote_code=request.remote_code,
    )
    check_same_model(golden, loaded)
    check_same_inputs(golden, loaded, request.inputs)
    return Side(loaded, device)


def set_up(side: Side, setup: str | None) -> Side:
    """Apply the setup function FILE.py:FUNC, if any, to the model of a side."""
    if setup is None:
        return side
    model = candidate_setup.set_up(side.loaded.model, setup)
    return replace(side, loaded=replace(side.loaded, model=model))


def shard(side: Side, rank: Rank) -> Side:
    """Shard the model of a side, for this rank."""
    mesh = rank.mesh["tp"]
    layout = RankBoundaries(apply_tensor_parallel(side.loaded.model, mesh), mesh.get_group())
    return replace(side, layout=layout)


def compile_model(side: Side, options: CandidateOptions) -> Side:
    """Compile the model of a side if the options say so."""
    loaded = options.compiled(side.loaded, side.device)
    return replace(side, loaded=loaded, compiled=options.compile)
