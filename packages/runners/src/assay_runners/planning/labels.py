"""What a label of a pull request asks for."""

import re
from difflib import get_close_matches

from assay_runners.fleet.entries import Fleet, Runner, Vendor
from assay_runners.planning.plan import Refusal

# Which sessions a label's tier runs, where the machine's entry has them.
TIER_SESSIONS = {
    "smoke": ("check", "smoke", "expectations"),
    "expectations": ("expectations",),
    "bench": ("bench",),
}
# Of these a label may ask for; benchmarks are started by hand.
LABELLED_TIERS = ("smoke", "expectations")
EVERY = "all"
# "smoke-nvidia" asks for a machine; "smoke" and "smoke tests" say what a pull request is about.
_WITHOUT_COLON = re.compile(r"(?P<tier>smoke|expectations|bench)[\W_]+(?P<target>.+)")

_NAME_AND_CARDS = r"(?P<name>.+?)(?:-(?P<cards>\d+))?"
_BY_HAND = "benchmarks take hours: start the workflow `bench` by hand, for a branch"


def read_label(label: str, fleet: Fleet) -> tuple[str, list[Runner]] | Refusal | None:
    """The tier and the machines that `label` asks for.

    GitHub compares labels without regard to case, and so does this; otherwise to the letter.

    Returns: a refusal if it means to ask for a machine but names none that there is, or one that
        does not run its tier; None if it is a label of another kind.
    """
    tier, colon, target = label.casefold().partition(":")
    if not colon:
        return _refuse_without_colon(label, fleet)
    if tier not in TIER_SESSIONS:
        return _refuse_tier(label, tier, target, fleet)
    if tier not in LABELLED_TIERS:
        return Refusal(asked=label, why=_BY_HAND)
    runners = find_able_runners(target, tier, fleet)
    if not runners:
        return Refusal(asked=label, why=describe_no_runner(target, tier, fleet, f"{tier}:"))
    return tier, runners


def find_runners(target: str, fleet: Fleet) -> list[Runner]:
    """The machines that `target` names; "all": of every vendor those with the fewest cards."""
    if target == EVERY:
        return [
            next(runner for runner in fleet.runners() if runner.vendor.name == vendor.name)
            for vendor in fleet.vendors
        ]
    runner = fleet.find(target)
    return [runner] if runner else []


def find_able_runners(target: str, tier: str, fleet: Fleet) -> list[Runner]:
    """The machines that `target` names and that run a session of the tier."""
    return [runner for runner in find_runners(target, fleet) if sessions_of(tier, runner)]


def describe_no_runner(target: str, tier: str, fleet: Fleet, prefix: str = "") -> str:
    """Why `find_able_runners` finds none: the machines run no such session, or there are none."""
    if find_runners(target, fleet):
        return f"the machines of {target} run no session of {tier}"
    nearest = _nearest_target(target.strip(), fleet)
    if nearest:
        return f"there is no machine {target!r}; nearest is {prefix}{nearest}"
    known = [*(runner.target for runner in fleet.runners()), EVERY]
    return f"there is no machine {target!r}; there are {', '.join(known)}"


def sessions_of(tier: str, runner: Runner) -> tuple[str, ...]:
    """The sessions of the tier that may run on such a machine."""
    return tuple(name for name in TIER_SESSIONS[tier] if name in runner.kind.sessions)


def _refuse_without_colon(label: str, fleet: Fleet) -> Refusal | None:
    words = _WITHOUT_COLON.fullmatch(label.casefold())
    named = words and re.fullmatch(_NAME_AND_CARDS, words["target"])
    if not words or not named or not _find_vendor(named["name"], fleet):
        return None
    if words["tier"] not in LABELLED_TIERS:
        return Refusal(asked=label, why=_BY_HAND)
    target = _nearest_target(words["target"], fleet)
    why = f"a machine is asked for with a colon: {words['tier']}:{target}"
    return Refusal(asked=label, why=why)


def _refuse_tier(label: str, tier: str, target: str, fleet: Fleet) -> Refusal | None:
    """None where the label is of another kind, such as "area:nvidia": its tier is none of ours."""
    nearest = get_close_matches(tier, TIER_SESSIONS, n=1, cutoff=0.75)
    if nearest:
        meant = target if target == EVERY else _nearest_target(target, fleet) or target
        why = f"there is no tier {tier!r}; nearest is {nearest[0]}:{meant}"
    elif tier in _sessions(fleet) and find_runners(target, fleet):
        labels = " and ".join(f"{known}:{target}" for known in LABELLED_TIERS)
        why = f"there is no tier {tier!r}; there are {labels}"
    else:
        return None
    return Refusal(asked=label, why=why)


def _sessions(fleet: Fleet) -> set[str]:
    """Those that some machine runs: "check:nvidia" asks for one."""
    return {name for runner in fleet.runners() for name in runner.kind.sessions}


def _nearest_target(target: str, fleet: Fleet) -> str:
    """By the vendor and the number of cards, else by the letters; "" where nothing is near."""
    named = re.fullmatch(_NAME_AND_CARDS, target)
    if named and (vendor := _find_vendor(named["name"], fleet)):
        cards = int(named["cards"] or 1)
        kind = min(vendor.runners, key=lambda kind: abs(kind.cards - cards))
        return Runner(vendor=vendor, kind=kind).target
    known = [*(runner.target for runner in fleet.runners()), EVERY]
    return next(iter(get_close_matches(target, known, n=1, cutoff=0.6)), "")


def _find_vendor(name: str, fleet: Fleet) -> Vendor | None:
    called = ((vendor, (vendor.name, *vendor.also_called)) for vendor in fleet.vendors)
    return next((vendor for vendor, names in called if name in names), None)
