"""What a smoke run does, as data."""

from typing import Literal

from pydantic import Field

from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.models.sources import resolve_model
from assay.training.protocol import TrainingPlan
from assay.verdicts import SCHEMA, Record

Part = Literal["set-up", "step", "checkpoint", "tear-down", "resume"]


class Cycle(Record):
    """One abbreviated run, once uninterrupted and once resumed from its checkpoint."""

    name: str
    model: str
    run: str
    trainer: str | None = None
    features: list[str]
    steps: int = Field(ge=2)
    resume_at: int = Field(ge=1)
    micro_batches: int = 2
    seed: int = 0

    @property
    def training_plan(self) -> TrainingPlan:
        """The plan of its trainer."""
        return TrainingPlan(
            model=self.model,
            run=self.run,
            steps=self.steps,
            micro_batches=self.micro_batches,
            resume_at=self.resume_at,
            seed=self.seed,
            features=frozenset(self.features),
        )

    @property
    def parts(self) -> dict[str, list[Part]]:
        """What each of the two processes does, in order."""
        before: list[Part] = ["step"] * self.resume_at
        after: list[Part] = ["step"] * (self.steps - self.resume_at)
        return {
            "uninterrupted": ["set-up", *before, "checkpoint", *after, "tear-down"],
            "resumed": ["set-up", "resume", *after, "checkpoint", "tear-down"],
        }


class SmokePlan(Record):
    """All cycles, in order."""

    schema_: int = Field(default=SCHEMA, alias="schema")
    cycles: list[Cycle]

    def describe(self) -> str:
        """One line for each process of each cycle."""
        return "\n".join(
            f"{cycle.name}, {process}: {' '.join(parts)}"
            for cycle in self.cycles
            for process, parts in cycle.parts.items()
        )


def plan_smoke(run: str, model: str, trainer: str | None) -> SmokePlan:
    """The cycles for one device and model. Raises: UsageError if either means nothing."""
    parse_run(run)
    source = resolve_model(model)
    if source.recipe is not None and source.recipe.masked:
        raise UsageError(f"{model} predicts no next token: it cannot be fine-tuned as these are")
    cycle = Cycle(
        name=f"{model} with LoRA on {run}",
        model=model,
        run=run,
        trainer=trainer,
        features=["lora"],
        steps=4,
        resume_at=2,
    )
    return SmokePlan(schema=SCHEMA, cycles=[cycle])
