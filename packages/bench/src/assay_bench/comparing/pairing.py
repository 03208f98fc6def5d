"""Pairs of items that ask the same question, and reasons why two evaluations are not comparable."""

from collections.abc import Iterator, Mapping
from typing import Any

from assay.errors import name_some
from assay_bench.evaluations.items import Evaluation, Item, TaskResult

Pair = tuple[Item, Item]


def differences(base: Evaluation, candidate: Evaluation) -> list[str]:
    """List how the questions differ.

    Documents are matched by content, in any order.
    """
    found = list(_differing(base.asked, candidate.asked))
    missing = [name for name in base.tasks if name not in candidate.tasks]
    if missing:
        found.append(f"the candidate has no {name_some(missing)}")
    for name, task in base.tasks.items():
        if name in candidate.tasks:
            found += [f"{name}: {what}" for what in _differences_of(task, candidate.tasks[name])]
    return found


def trained_elsewhere(base: Evaluation, candidate: Evaluation) -> str:
    """Say why the same training can have given the candidate other weights; "" if nothing says so.

    A fact that one side lacks does not count: lm-eval's own command line records fewer.
    """

    def differs(name: str) -> bool:
        sides = base.facts.get(name), candidate.facts.get(name)
        return None not in sides and sides[0] != sides[1]

    if not differs("weights_hash"):
        return ""
    versions = [side.facts.get("versions", {}).get("torch") for side in (base, candidate)]
    reasons = [f"another machine ({candidate.facts['machine']})"] if differs("machine") else []
    reasons += (
        [f"torch {versions[1]}"] if None not in versions and versions[0] != versions[1] else []
    )
    return ", ".join(reasons)


def pairs_of(base: TaskResult, candidate: TaskResult) -> list[Pair]:
    """Pair all items, in the order of the base. Raises: KeyError for a missing item."""
    others = {item.key: item for item in candidate.items}
    return [(item, others[item.key]) for item in base.items]


def _differences_of(base: TaskResult, candidate: TaskResult) -> Iterator[str]:
    yield from _differing(base.asked, candidate.asked)
    if base.metric != candidate.metric:
        yield f"metric is {candidate.metric}, base {base.metric}"
    ours, theirs = ({item.key: item for item in side.items} for side in (base, candidate))
    if missing := len(ours.keys() - theirs.keys()):
        yield f"missing from the candidate: {missing} of {len(ours)} documents"
    if extra := len(theirs.keys() - ours.keys()):
        yield f"only in the candidate: {extra} documents"
    both = [(ours[key], theirs[key]) for key in ours if key in theirs]
    for what, field in (("prompts", "prompt_hash"), ("right answers", "target_hash")):
        if num_different := sum(getattr(one, field) != getattr(two, field) for one, two in both):
            yield f"{num_different} of {len(both)} {what} differ"


def _differing(base: Mapping[str, Any], candidate: Mapping[str, Any]) -> Iterator[str]:
    for name in base.keys() | candidate.keys():
        was, is_ = base.get(name), candidate.get(name)
        if was != is_:
            yield f"{name} is {_shown(is_)}, base {_shown(was)}"


_MAX_CHARACTERS = 60


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"
