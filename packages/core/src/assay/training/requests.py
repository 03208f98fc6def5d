"""What the processes of `assay check train` are asked for, and what they answer, as JSON."""

from typing import Any

from pydantic import Field

from assay.models.folders import RemoteCode
from assay.stages import TrainingPlan
from assay.verdicts import Number, Record


class TrainOptions(Record):
    """What is trained, alike on both sides."""

    model: str
    steps: int = 3
    resume_at: int = 2
    micro_batches: int = 2
    lora: bool = False
    seed: int = 0
    remote_code: RemoteCode = "refuse"

    def plan(self, run: str, setup: str | None = None) -> TrainingPlan:
        """The plan of a trainer on `run`."""
        return TrainingPlan(
            model=self.model,
            run=run,
            steps=self.steps,
            micro_batches=self.micro_batches,
            resume_at=self.resume_at,
            seed=self.seed,
            features=frozenset({"lora"} if self.lora else ()),
            setup=setup,
        )


class ReferenceRequest(Record):
    """The trusted process: yardstick and noise run for candidates in `dtype`."""

    options: TrainOptions
    reference: str
    dtype: str
    folder: str


class CandidateRequest(Record):
    """The candidate process: the trainer as it is to be judged, against a golden."""

    options: TrainOptions
    candidate: str
    golden: str
    folder: str
    trainer: str | None = None
    setup: str | None = None


class StepRecord(Record):
    """One optimizer step of a free run."""

    step: int
    loss: Number
    num_tokens: int
    grad_norm: Number


class FreeRun(Record):
    """A run of which nothing is replaced, and its resumption from the checkpoint in the middle.

    saved: what the model folder does not hold as the model did when it was saved.
    not_restored: parts of the state that are not as they were saved; compared: how many there are.
    problem: why the checkpoint could not be written or read.
    """

    steps: list[StepRecord] = Field(default_factory=list)
    resumed: list[StepRecord] = Field(default_factory=list)
    saved: list[str] = Field(default_factory=list)
    not_restored: list[str] = Field(default_factory=list)
    compared: int = 0
    saved_compared: int = 0
    problem: str | None = None
    notes: list[str] = Field(default_factory=list)


class ReferenceReport(Record):
    """What the trusted process says of itself, beside what it recorded."""

    model: dict[str, Any]
    reference: dict[str, Any]
    yardstick_losses: list[Number]
    noise_losses: list[Number]
    num_trainable: int
    shared: list[list[str]]
    notes: list[str] = Field(default_factory=list)


class CandidateReport(Record):
    """What the candidate process says of itself, beside what it measured.

    seen: phases whose method was called; invisible: those that the trainer declares so, and why.
    weights_different: parameters that are not the reference's before the first step.
    not_in_optimizer: parameters that the reference trains and this optimizer does not hold.
    strayed: parameters that this optimizer changes and the reference does not train.
    not_taken: parts of a state that the trainer's load_state_dict does not take over.
    drew_in_backward: whether a backward pass left the generator in another state than before.
    """

    run: dict[str, Any]
    free: FreeRun
    seen: list[str]
    invisible: dict[str, str]
    weights_different: list[str]
    not_in_optimizer: list[str]
    strayed: list[str] = Field(default_factory=list)
    shared: list[list[str]]
    not_taken: list[str]
    drew_in_backward: bool = False
    logit_gradients: list["CallScale"] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)


class CallScale(Record):
    """The gradient at the logits of one micro-batch beside the reference's.

    slope: of the error on the expected value; rest: what the slope leaves, as a relative error.
    """

    step: int
    micro_batch: int
    slope: Number
    rest: Number
