"""Pairs of modules with unlike names or classes whose values contradict the pair.

An error spreads to what follows: to the values that get the wrong result, to the outputs of the modules around
it, of later blocks, and to the logits. Where one of them agrees, a difference means that the two modules compute
different values, not that one is wrong.
"""

from collections.abc import Mapping, Sequence

from assay.offline.judging.judged_ports import JudgedPort
from assay.offline.judging.locating import is_inside
from assay.offline.ports.lanes import BLOCK, LanePair, Port, without_numbers

Doubt = tuple[JudgedPort, LanePair]


def find_doubts(judged: Sequence[JudgedPort], pairs: Sequence[LanePair]) -> list[Doubt]:
    """Return the different ports whose pair is a guess that later results refute.

    A guess that is refuted in one block is refuted in all of them, unless it holds in one.
    """
    pair_of = {pair.port: pair for pair in pairs}
    failed = [
        one
        for one in judged
        if not one.agrees and one.port.phase == "forward"
        if one.port in pair_of and _is_guess(pair_of[one.port])
    ]
    known = [one for one in judged if one.port in pair_of]
    agreeing = [one for one in known if one.agrees and one.result.sums.ee]
    confirmed = {_pattern(pair_of[one.port]) for one in agreeing}
    refuted = {
        _pattern(pair_of[one.port])
        for one in failed
        if any(_depends_on(other, one, pair_of) for other in agreeing)
    } - confirmed
    return [(one, pair_of[one.port]) for one in failed if _pattern(pair_of[one.port]) in refuted]


def _is_guess(pair: LanePair) -> bool:
    is_renamed = pair.expected.port.name != pair.actual.port.name
    return pair.is_guess or (pair.port.direction == "input" and is_renamed)


def _pattern(pair: LanePair) -> tuple[str, ...]:
    """Return the ports of a pair, alike in all blocks."""
    return tuple(without_numbers(str(one.port)) for one in (pair.expected, pair.actual))


def _depends_on(later: JudgedPort, one: JudgedPort, pair_of: Mapping[Port, LanePair]) -> bool:
    """Return True if `later` is a value that an error of `one` would change."""
    if (later.result.rank, later.result.step) != (one.result.rank, one.result.step):
        return False
    if later.port.direction != "output":
        return later.port.direction == "input" and _is_same_in_expected(later, one)
    # A part of a fused module is reported by ACTUAL's name.
    module, outer = (pair_of[item.port].expected.port.module for item in (one, later))
    if later.port.level == "logits" or is_inside(module, outer):
        return True
    if one.port.direction == "input" and module == outer:
        return True
    own, block = BLOCK.match(module), BLOCK.fullmatch(outer)
    is_same_list = block is not None and (own is None or own[1] == block[1])
    return is_same_list and later.order > one.order


def _is_same_in_expected(later: JudgedPort, one: JudgedPort) -> bool:
    """Return True if EXPECTED passes the value of `one` on to `later`."""
    sums, others = one.result.sums, later.result.sums
    is_same = (sums.num_elements, sums.ee) == (others.num_elements, others.ee)
    return is_same and sums.ee > 0 and later.order > one.order
