"""Answers of the processes of `assay check train --overfit`."""

from typing import Any

from pydantic import Field

from assay.comparing.coverage import Usage
from assay.training.protocol import StepReport
from assay.verdicts import Number, Record

# Folder of the candidate's trained weights, below the folder that the candidate writes to.
TRAINED = "trained"


class LossCurve(Record):
    """Losses in nats per label token, and gradient norms before clipping, by step."""

    losses: list[Number] = Field(default_factory=list)
    grad_norms: list[Number] = Field(default_factory=list)

    def add(self, step: StepReport) -> None:
        """Add a step."""
        self.losses.append(float(step.loss))
        self.grad_norms.append(float(step.grad_norm))


class Memorization(Record):
    """Prediction of the sequences by trained weights, measured on the trusted device."""

    nats: dict[str, Number] = Field(default_factory=dict)
    """Mean loss per token of each kind in `assay.training.overfit.memorization.KINDS`.

    Empty if the weights do not fit the model.
    """
    missing: list[str] = Field(default_factory=list)


class OverfitReference(Record):
    """The answer of the trusted process: yardstick and noise run."""

    model: dict[str, Any]
    reference: dict[str, Any]
    yardstick: LossCurve
    noise: LossCurve
    memorization: Memorization
    num_tokens: int
    trainable: list[str]
    moved: list[str]
    """Parameters of which the noise run changed most elements."""
    touched: list[str]
    """Parameters of which the noise run changed any element."""
    usage: Usage
    """Parts of the model that predicting the sequences uses."""
    draws: bool = False
    """True if training draws random numbers, for dropout for example."""


class OverfitCandidate(Record):
    """The answer of the candidate, or of one of its ranks."""

    run: dict[str, Any]
    curve: LossCurve
    num_tokens: list[int]
    unmoved: list[str]
    """Parameters of this rank that kept every bit."""
    touched: list[str]
    weights_different: list[str] = Field(default_factory=list)
