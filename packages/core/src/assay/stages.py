"""Stages: the parts of a run that are replayed from the reference's inputs and judged separately.

In the forward pass a stage is the code of one module without its children: a module computes the
arguments of its children, and a child its results. The reference's values are injected at each of these
boundaries, so that an error stays in the stage that makes it.
Training adds stages of other phases. A trainer declares which of them can be observed.
"""

from dataclasses import dataclass
from typing import Literal

from assay.sites import Call, Phase

# Faults of training labels: labels shifted by one, a prompt or padding trained on, trained tokens
# masked, another token as the label.
LabelFault = Literal["not-shifted", "shifted-twice", "prompt", "padding", "masked", "other"]


@dataclass(frozen=True, slots=True, order=True)
class Stage:
    """The code of `module` in `phase`, outside of its children."""

    module: str
    phase: Phase = "forward"

    def __str__(self) -> str:
        return self.module or "(model)"


def stage_that_made(call: Call, port: str) -> Stage:
    """Return the stage whose code computed the tensor at `port` of `call`.

    The caller computes an input; the generation loop (phase `inputs`) computes those of the root call.
    The called module computes an output or a changed argument. Gradients go the other way: the called
    module computes that of an input, the caller that of an output, and the loss (the model's own
    stage) that of the root call's output.
    """
    if call.site.phase == "backward":
        made_here = port.startswith("input.") or call.caller is None
        return Stage(call.site.module if made_here else call.caller or "", "backward")
    if not port.startswith("input."):
        return Stage(call.site.module, call.site.phase)
    if call.caller is None:
        return Stage(call.site.module, "inputs")
    return Stage(call.caller, call.site.phase)
