"""The plan of an event: the jobs that it starts, the refused requests, or why nothing runs."""

import shlex

from pydantic import BaseModel, ConfigDict


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class TierJob(_Part):
    """A session without an accelerator, on a GitHub-hosted machine."""

    session: str
    python: str


class SessionCall(_Part):
    """`nox -s SESSION -- ARGUMENTS`."""

    session: str
    arguments: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """The arguments of nox."""
        return ["-s", self.session, *(["--", *self.arguments] if self.arguments else [])]

    def __str__(self) -> str:
        return shlex.join(["nox", *self.words])


class MachineJob(_Part):
    """A job for one machine with accelerators."""

    target: str
    """The machine, as a label names it: "nvidia-4"."""
    tier: str
    """The purpose: "smoke", "expectations", "bench"."""
    cards: int
    """How many devices the machine must have."""
    calls: tuple[SessionCall, ...]
    """The sessions, in the order in which they run."""
    timeout_minutes: int
    variables: dict[str, str] = {}
    why: str
    """The request that led to the job."""


class Refusal(_Part):
    """A request that will not run."""

    asked: str
    """The request, in the words of its author."""
    why: str
    """The reason in one sentence, with the request to make instead."""


class Plan(_Part):
    """The jobs that an event starts."""

    event: str
    sha: str
    """The commit that the jobs check out."""
    tiers: tuple[TierJob, ...] = ()
    afterwards: tuple[SessionCall, ...] = ()
    """An abbreviated training, which a GitHub-hosted machine runs once all tiers are green."""
    machines: tuple[MachineJob, ...] = ()
    refused: tuple[Refusal, ...] = ()
    nothing: str = ""
    """Why no job was chosen; "" if there are jobs."""
