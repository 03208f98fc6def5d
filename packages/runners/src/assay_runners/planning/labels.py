"""What a label of a pull request asks for."""

from difflib import get_close_matches

from assay_runners.fleet.entries import Fleet, Runner
from assay_runners.planning.plan import Refusal

# Which sessions a label's tier runs, where the machine's entry has them.
TIER_SESSIONS = {
    "smoke": ("check", "smoke", "expectations"),
    "expectations": ("expectations",),
    "bench": ("bench",),
}
EVERY = "all"


def read_label(label: str, fleet: Fleet) -> tuple[str, list[Runner]] | Refusal | None:
    """The tier and the machines that `label` asks for.

    GitHub compares labels without regard to case, and so does this.

    Returns: a refusal if it means to ask for a machine but names none that there is, or one that
        does not run its tier; None if it is a label of another kind.
    """
    tier, colon, target = label.casefold().partition(":")
    tier, target = tier.strip(), target.strip()
    if not colon:
        return None
    if tier not in TIER_SESSIONS:
        nearest = get_close_matches(tier, TIER_SESSIONS, n=1, cutoff=0.75)
        if not nearest:
            return None
        return Refusal(
            asked=label, why=f"there is no tier {tier!r}; nearest is {nearest[0]}:{target}"
        )
    runners = find_runners(target, fleet)
    if not runners:
        return Refusal(asked=label, why=unknown_target(target, fleet, f"{tier}:"))
    able = [runner for runner in runners if sessions_of(tier, runner)]
    if not able:
        return Refusal(asked=label, why=f"the machines of {target} run no session of {tier}")
    return tier, able


def find_runners(target: str, fleet: Fleet) -> list[Runner]:
    """The machines that `target` names; "all": of every vendor those with the fewest cards."""
    if target == EVERY:
        return [
            next(runner for runner in fleet.runners() if runner.vendor.name == vendor.name)
            for vendor in fleet.vendors
        ]
    runner = fleet.find(target)
    return [runner] if runner else []


def unknown_target(target: str, fleet: Fleet, prefix: str = "") -> str:
    """What to say to somebody who named a machine that there is none of."""
    known = [*(runner.target for runner in fleet.runners()), EVERY]
    nearest = get_close_matches(target, known, n=1, cutoff=0.5)
    if nearest:
        return f"there is no machine {target!r}; nearest is {prefix}{nearest[0]}"
    return f"there is no machine {target!r}; there are {', '.join(known)}"


def sessions_of(tier: str, runner: Runner) -> tuple[str, ...]:
    """The sessions of the tier that may run on such a machine."""
    return tuple(name for name in TIER_SESSIONS[tier] if name in runner.kind.sessions)
