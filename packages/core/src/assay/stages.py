"""Stages: the parts of a run that are replayed from the reference's inputs and judged separately.

In the forward pass a stage is the code of one module outside of its children: a module computes
the arguments of its children, a child its results. With the reference's values injected at every
one of these boundaries, an error stays in the stage that makes it.
Training adds stages of other phases; a trainer declares which of them can be observed.
"""

from dataclasses import dataclass
from typing import Literal

from assay.sites import Call, Phase

# Faults of training labels: a prompt or padding is trained on, tokens to be trained on are masked,
# another token is the label, all labels are shifted by one.
LabelFault = Literal["not-shifted", "shifted-twice", "prompt", "padding", "masked", "other"]


@dataclass(frozen=True, slots=True, order=True)
class Stage:
    """The code of `module` in `phase`, outside of its children."""

    module: str
    phase: Phase = "forward"

    def __str__(self) -> str:
        return self.module or "(model)"


def stage_that_made(call: Call, port: str) -> Stage:
    """The stage whose code computed the tensor at `port` of `call`.

    An input is computed by the caller's code, for the root call by the generation loop (phase
    `inputs`); an output or a changed argument by the called module's own code. Gradients go the
    other way: that of an input is computed by the called module's own code, that of an output by
    the caller's, of the root call's output by the loss (the model's own stage).
    """
    if call.site.phase == "backward":
        made_here = port.startswith("input.") or call.caller is None
        return Stage(call.site.module if made_here else call.caller or "", "backward")
    if not port.startswith("input."):
        return Stage(call.site.module, call.site.phase)
    if call.caller is None:
        return Stage(call.site.module, "inputs")
    return Stage(call.caller, call.site.phase)
