"""A plan: the jobs that an event starts, what was refused, and why nothing runs if nothing does."""

from pydantic import BaseModel, ConfigDict


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class TierJob(_Part):
    """A session without an accelerator, on a machine of GitHub."""

    session: str
    python: str


class SessionCall(_Part):
    """`nox -s SESSION -- ARGUMENTS`."""

    session: str
    arguments: tuple[str, ...] = ()


class MachineJob(_Part):
    """What one machine with accelerators is asked for.

    target: which, as a label names it: "nvidia-4".
    tier: what for: "smoke", "expectations", "bench".
    cards: how many devices must be there.
    calls: what runs there, in this order.
    why: what asked for it.
    """

    target: str
    tier: str
    cards: int
    calls: tuple[SessionCall, ...]
    timeout_minutes: int
    variables: dict[str, str] = {}
    why: str


class Refusal(_Part):
    """Something that was asked for and will not run.

    asked: in the words of the one who asked.
    why: one sentence, with what to do instead.
    """

    asked: str
    why: str


class Plan(_Part):
    """What an event starts.

    sha: the commit that the jobs check out.
    afterwards: what a machine of GitHub runs once all tiers are green: an abbreviated training.
    nothing: why no job was chosen; "" where one was.
    """

    event: str
    sha: str
    tiers: tuple[TierJob, ...] = ()
    afterwards: tuple[SessionCall, ...] = ()
    machines: tuple[MachineJob, ...] = ()
    refused: tuple[Refusal, ...] = ()
    nothing: str = ""
