"""The rounding of an optimizer step in float32, for a run that computes in a narrower dtype."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from assay.comparing.results import ReplayResults
from assay.hooks.tensors import Boundary
from assay.stages import Stage
from assay.training.processes.requests import TrainOptions
from assay.training.replay.observing.update_watch import observe_update
from assay.training.replay.optimizer_results import step_adamw
from assay.training.replay.run_rows import RunRows
from assay.training.replay.stage_handlers import StageReplayer
from assay.training.replay.stage_values import ValueAddress
from assay.training.state.files import read_golden_state
from assay.training.state.parameters import NamedParameter


def measure_in_float32(
    golden: Path, options: TrainOptions, rows: RunRows, dtype: str
) -> ReplayResults:
    """Measure updates and moments of AdamW in float32, from a golden's clipped gradients and states.

    They are the noise for a run under mixed precision. Like the noise run, they are measured against
    the golden, parameter by parameter and without a model.
    """
    boundary = Boundary.exact_inputs_for(getattr(torch, dtype))
    handler = StageReplayer(golden, boundary, rows)
    plan = options.plan(f"cpu/{dtype}")
    for step in range(options.steps):
        handler.begin_step(step)
        state = read_golden_state(golden, step)
        for name in state["trainable"]:
            module, _, short = name.rpartition(".")
            address = ValueAddress(Stage(module, "clip"), f"gradient.{short}")
            gradient = handler.injected(address, torch.float32)
            if gradient is None:
                continue  # the reference has none
            before, moments = state["model"][name], state["moments"].get(name, {})
            settings = plan.settings_of(name, step)
            weight, moments = step_adamw(before, gradient, moments, settings, torch.float32)
            item = NamedParameter(name, module, "", nn.Parameter(weight))
            observe_update(handler, item, weight.double() - before.double(), moments)
    results = handler.results["optimizer"]
    results.flush()
    return results


class AdamWInFloat32(torch.optim.AdamW):
    """AdamW with moments and arithmetic in float32, for parameters in a narrower dtype.

    The noise run uses it in a dtype that cannot keep moments.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters, and round each once."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    moments = self.state.get(parameter, {})
                    new, self.state[parameter] = step_adamw(
                        parameter, parameter.grad, moments, group, torch.float32
                    )
                    parameter.copy_(new)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state without rounding moments to the dtype of their parameter, as torch does."""
        super().load_state_dict(dict(state_dict))
        parameters = [one for group in self.param_groups for one in group["params"]]
        for number, moments in state_dict["state"].items():
            self.state[parameters[number]] = _in_float32(moments)


def _in_float32(moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(torch.float32, copy=True) for name, value in moments.items()}
