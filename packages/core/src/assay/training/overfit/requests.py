"""What the processes of `assay check train --overfit` are asked for, and what they answer."""

from typing import Any

from pydantic import Field

from assay.comparing.coverage import Usage
from assay.training.processes.requests import TrainOptions
from assay.verdicts import Number, Record

# Folder of the weights that a candidate has trained, below the one it writes to.
TRAINED = "trained"


class MemorizationRequest(Record):
    """The trusted process, once more: how well do the candidate's weights predict the sequences?

    trained: folder of what `write_trained` wrote on each rank.
    """

    options: TrainOptions
    reference: str
    dtype: str
    trained: str


class Curve(Record):
    """What every step reported: losses in nats per label token, gradient norms before clipping."""

    losses: list[Number] = Field(default_factory=list)
    grad_norms: list[Number] = Field(default_factory=list)


class Memorization(Record):
    """How well trained weights predict the sequences, measured on the trusted device.

    nats: mean loss per token of each kind of `assay.training.overfit.memorization.KINDS` that the sequences
        have; empty where the weights are not of this model.
    missing: parameters of the model that were not among the weights.
    """

    nats: dict[str, Number] = Field(default_factory=dict)
    missing: list[str] = Field(default_factory=list)


class OverfitReference(Record):
    """Yardstick and noise run.

    moved: parameters of which the noise run changed most elements; touched: any element.
    draws: whether training draws random numbers, as dropout does.
    """

    model: dict[str, Any]
    reference: dict[str, Any]
    yardstick: Curve
    noise: Curve
    memorization: Memorization
    num_tokens: int
    trainable: list[str]
    moved: list[str]
    touched: list[str]
    usage: Usage
    """Parts of the model that predicting the sequences uses."""
    draws: bool = False


class OverfitCandidate(Record):
    """The candidate, or one rank of it.

    unmoved, touched: its parameters that kept every bit, and the others.
    weights_different: parameters that are not the reference's before the first step.
    """

    run: dict[str, Any]
    curve: Curve
    num_tokens: list[int]
    unmoved: list[str]
    touched: list[str]
    weights_different: list[str] = Field(default_factory=list)
