"""The machines and sessions that a label of a pull request requests."""

import re
from difflib import get_close_matches

from assay.devices.vendor_names import find_vendor_name
from assay_runners.fleet.entries import Fleet, Runner, Vendor
from assay_runners.planning.plan import Refusal

# The sessions of a tier. A machine runs those that its entry lists.
TIER_SESSIONS = {
    "smoke": ("check", "smoke", "expectations"),
    "expectations": ("expectations",),
    "bench": ("bench",),
}
# The tiers that a label may request; benchmarks are started by hand.
LABELED_TIERS = ("smoke", "expectations")
EVERY = "all"
# "smoke-nvidia" is a misspelled request; "smoke" and "smoke tests" are topics of a pull request.
_WITHOUT_COLON = re.compile(r"(?P<tier>smoke|expectations|bench)[\W_]+(?P<target>.+)")

_NAME_AND_CARDS = r"(?P<name>.+?)(?:-(?P<cards>\d+))?"
_BY_HAND = "benchmarks take hours: start the workflow `bench` by hand, for a branch"


def read_label(label: str, fleet: Fleet) -> tuple[str, list[Runner]] | Refusal | None:
    """Read the tier and the machines that `label` requests.

    Case is ignored, as GitHub does.
    Returns: a refusal if the label is a request for a machine that does not exist or does not run the
        tier; None if it is not a request.
    """
    tier, colon, target = label.casefold().partition(":")
    if not colon:
        return _refuse_without_colon(label, fleet)
    if tier not in TIER_SESSIONS:
        return _refuse_tier(label, tier, target, fleet)
    if tier not in LABELED_TIERS:
        return Refusal(asked=label, why=_BY_HAND)
    runners = find_able_runners(target, tier, fleet)
    if not runners:
        return Refusal(asked=label, why=describe_no_runner(target, tier, fleet, f"{tier}:"))
    return tier, runners


def find_runners(target: str, fleet: Fleet) -> list[Runner]:
    """Find the machines that `target` names. "all" names each vendor's machines with the fewest cards."""
    if target == EVERY:
        return [Runner(vendor=vendor, kind=vendor.runners[0]) for vendor in fleet.vendors]
    runner = fleet.find(target)
    return [runner] if runner else []


def find_able_runners(target: str, tier: str, fleet: Fleet) -> list[Runner]:
    """Find the machines that `target` names and that run a session of the tier."""
    return [runner for runner in find_runners(target, fleet) if sessions_of(tier, runner)]


def describe_no_runner(target: str, tier: str, fleet: Fleet, prefix: str = "") -> str:
    """Say why `find_able_runners` finds nothing."""
    if find_runners(target, fleet):
        return f"the machines of {target} run no session of {tier}"
    nearest = _nearest_target(target.strip(), fleet)
    if nearest:
        return f"there is no machine {target!r}; nearest is {prefix}{nearest}"
    known = [*(runner.target for runner in fleet.runners()), EVERY]
    return f"there is no machine {target!r}; there are {', '.join(known)}"


def list_labels(fleet: Fleet) -> list[str]:
    """List the labels that request a machine."""
    return [
        f"{tier}:{target}"
        for tier in LABELED_TIERS
        for target in (*(one.target for one in fleet.runners() if sessions_of(tier, one)), EVERY)
    ]


def sessions_of(tier: str, runner: Runner) -> tuple[str, ...]:
    """List the sessions of the tier that such a machine runs."""
    return tuple(name for name in TIER_SESSIONS[tier] if name in runner.kind.sessions)


def _refuse_without_colon(label: str, fleet: Fleet) -> Refusal | None:
    words = _WITHOUT_COLON.fullmatch(label.casefold())
    named = words and re.fullmatch(_NAME_AND_CARDS, words["target"])
    if not words or not named or not _find_vendor(named["name"], fleet):
        return None
    if words["tier"] not in LABELED_TIERS:
        return Refusal(asked=label, why=_BY_HAND)
    target = _nearest_target(words["target"], fleet)
    why = f"a machine is asked for with a colon: {words['tier']}:{target}"
    return Refusal(asked=label, why=why)


def _refuse_tier(label: str, tier: str, target: str, fleet: Fleet) -> Refusal | None:
    """Refuse a label with an unknown tier, or with a session for its tier ("check:nvidia").

    Returns: None for a topic, such as "area:nvidia".
    """
    nearest = get_close_matches(tier, TIER_SESSIONS, n=1, cutoff=0.75)
    sessions = {name for runner in fleet.runners() for name in runner.kind.sessions}
    if nearest:
        meant = target if target == EVERY else _nearest_target(target, fleet) or target
        why = f"there is no tier {tier!r}; nearest is {nearest[0]}:{meant}"
    elif tier in sessions and find_runners(target, fleet):
        labels = " and ".join(f"{known}:{target}" for known in LABELED_TIERS)
        why = f"there is no tier {tier!r}; there are {labels}"
    else:
        return None
    return Refusal(asked=label, why=why)


def _nearest_target(target: str, fleet: Fleet) -> str:
    """Find the nearest target by vendor and number of cards, else by spelling; "" if there is none."""
    named = re.fullmatch(_NAME_AND_CARDS, target)
    if named and (vendor := _find_vendor(named["name"], fleet)):
        cards = int(named["cards"] or 1)
        kind = min(vendor.runners, key=lambda kind: abs(kind.cards - cards))
        return Runner(vendor=vendor, kind=kind).target
    known = [*(runner.target for runner in fleet.runners()), EVERY]
    return next(iter(get_close_matches(target, known, n=1, cutoff=0.6)), "")


def _find_vendor(name: str, fleet: Fleet) -> Vendor | None:
    known = find_vendor_name(name)
    return next((vendor for vendor in fleet.vendors if vendor.name == known), None)
