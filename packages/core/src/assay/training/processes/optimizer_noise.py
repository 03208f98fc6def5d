"""What an optimizer step rounds that is kept in float32, beside a run that computes in less."""

from pathlib import Path

import torch
from torch import nn

from assay.comparing.results import ReplayResults
from assay.hooks.values.boundary import Boundary
from assay.stages import Stage
from assay.trace import Trace
from assay.training.processes.golden import read_golden_state
from assay.training.processes.requests import TrainOptions
from assay.training.replay.observing.update_watch import observe_update
from assay.training.replay.replayed_steps import TRACE
from assay.training.replay.run_rows import RunRows
from assay.training.replay.stage_replayer import StageReplayer
from assay.training.replay.stage_values import ValueAddress
from assay.training.state.parameters import NamedParameter


def measure_in_float32(
    golden: Path, options: TrainOptions, rows: RunRows, boundary: Boundary
) -> ReplayResults:
    """Updates and moments of AdamW in float32, from a golden's clipped gradients and states.

    What a run under mixed precision is held to, which keeps both in float32: measured against the
    golden as the noise run is, parameter by parameter, without a model.
    """
    handler = StageReplayer(Trace.open(golden / TRACE), boundary, rows)
    for step in range(options.steps):
        handler.begin_step(step)
        state = read_golden_state(golden, step)
        for name in state["trainable"]:
            module, _, short = name.rpartition(".")
            address = ValueAddress(Stage(module, "clip"), f"gradient.{short}")
            gradient = handler.injected(address, torch.float32)
            if gradient is None:
                continue  # the reference gives it none
            weight = nn.Parameter(state["model"][name].to(torch.float32, copy=True))
            item = NamedParameter(name, module, "", weight)
            weight.grad = gradient
            optimizer = torch.optim.AdamW([weight], lr=options.learning_rate)
            if name in state["moments"]:
                optimizer.state[weight] = {
                    key: value.to(torch.float32, copy=True)
                    for key, value in state["moments"][name].items()
                }
            before = weight.detach().double()
            optimizer.step()
            update = weight.detach().double() - before
            observe_update(handler, item, update, optimizer.state[weight])
    results = handler.results["optimizer"]
    results.flush()
    return results
