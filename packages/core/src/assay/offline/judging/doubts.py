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
    """Return the different ports whose pair later results refute.

    A guess that is refuted in one block is refuted in all of them, unless it holds in one. A pair of equal names
    and classes is refuted only if it differs in several blocks, in none of which it changes anything: vLLM 0.32
    computes the gate of shared experts in their module, transformers 5.23 outside of it.
    """
    pair_of = {pair.port: pair for pair in pairs}
    failed: dict[tuple[str, ...], list[JudgedPort]] = {}
    for one in judged:
        if not one.agrees and one.port in pair_of and one.port.phase == "forward":
            failed.setdefault(_pattern(pair_of[one.port]), []).append(one)
    known = [one for one in judged if one.port in pair_of]
    agreeing = [one for one in known if one.agrees and one.result.sums.num_elements]
    confirmed = {_pattern(pair_of[one.port]) for one in agreeing}

    def is_refuted(ports: Sequence[JudgedPort]) -> bool:
        if _is_guess(pair_of[ports[0].port]):
            return any(_depends_on(other, one, pair_of) for one in ports for other in agreeing)
        is_in_several = len({one.port for one in ports}) > 1
        return is_in_several and all(_has_no_effect(one, judged) for one in ports)

    return [
        (one, pair_of[one.port])
        for pattern, ports in failed.items()
        if pattern not in confirmed and is_refuted(ports)
        for one in ports
    ]


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


def _has_no_effect(one: JudgedPort, judged: Sequence[JudgedPort]) -> bool:
    """Return True if the module around that of `one` agrees, and all that get its value in EXPECTED do."""
    around = [
        other
        for other in judged
        if (other.port.direction, other.result.step) == ("output", one.result.step)
        and is_inside(one.port.module, other.port.module)
    ]
    nearest = max(around, key=lambda other: len(other.port.module), default=None)
    receivers = (other for other in judged if other.port.direction == "input")
    is_used = any(not other.agrees and _is_same_in_expected(other, one) for other in receivers)
    is_result = one.port.direction == "output"
    return is_result and nearest is not None and nearest.agrees and not is_used
