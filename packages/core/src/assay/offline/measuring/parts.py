"""Reading the parts of a tensor that ranks hold, each with its expected values."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from assay.dumps.protocol import Dump, DumpedTensor
from assay.files import UnreadableFileError
from assay.offline.layouts.placements import LayoutError, Placement, place_declared
from assay.offline.layouts.shards import (
    PlacementFinder,
    PlacementRule,
    RuleCandidate,
    find_wrong_summand,
    list_fused_rules,
    list_rules,
    pair_parts,
    relative_difference,
)
from assay.offline.measuring.shapes import give_comparable
from assay.offline.ports.lanes import LanePair
from assay.offline.tokens.passes import PassPair

# The rule of each side; None where the dump declares the placement, or if no rule fits.
PlacementRules = tuple[PlacementRule | None, PlacementRule | None]

# Number of passes that determine the placement. In one pass, a summand may be zero.
_NUM_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class HeldCall:
    """The tensors of one call on all ranks of both sides."""

    expected: list[DumpedTensor]
    actual: list[DumpedTensor]
    tokens: PassPair | None
    """The passes; None for a parameter."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an actual tensor, and its expected values."""

    holder: int
    """Index of its rank in the call."""
    value: Tensor
    reference: Tensor


def find_rules(
    expected: Dump, actual: Dump, lanes: LanePair, calls: Sequence[HeldCall]
) -> PlacementRules | None:
    """Return the placement rules of a port; None if no rule fits."""
    calls = [one for one in calls if all(t.has_values for t in (*one.expected, *one.actual))]
    if not calls or all(len(one.expected) == len(one.actual) == 1 for one in calls):
        return PlacementRule("replicated"), PlacementRule("replicated")
    calls.sort(key=lambda one: -len(one.expected) - len(one.actual))
    first = calls[0]
    is_declared = bool(first.expected[0].layout), bool(first.actual[0].layout)
    if all(is_declared):
        return None, None
    best: RuleCandidate | None = None
    for list_candidates in (list_rules, list_fused_rules):
        finder = PlacementFinder(is_declared, list_candidates)
        for call in calls[:_NUM_SAMPLES]:
            try:
                sides = _read_both(expected, actual, lanes, call)
                placed = _place_declared(call, sides)
            except (UnreadableFileError, LayoutError):
                continue
            finder.add_pass(sides, placed, partial(give_comparable, call.tokens))
        found = finder.find()
        if found is not None and (best is None or found.misfit_share < best.misfit_share):
            best = found
        if best is not None and not best.num_misfits:
            break
    return best.rules if best is not None else None


def read_parts(
    expected: Dump, actual: Dump, lanes: LanePair, call: HeldCall, rules: PlacementRules | None
) -> tuple[list[Part], dict[int, float]]:
    """Return the parts of one call, and the difference of every expected replica by holder.

    Raises: UnreadableFileError; LayoutError if no rule fits, or if a declared layout contradicts the tensors.
    """
    sides = _read_both(expected, actual, lanes, call)
    declared = _place_declared(call, sides)
    single = tuple(PlacementRule("replicated") if len(side) == 1 else None for side in sides)
    placed = [
        placement or (rule.place([tuple(one.shape) for one in side]) if rule is not None else None)
        for rule, placement, side in zip(rules or single, declared, sides, strict=True)
    ]
    if placed[0] is None or placed[1] is None:
        wanted, shapes = (", ".join(str(list(one.shape)) for one in side) for side in sides)
        raise LayoutError(f"its shape is {shapes}, expected {wanted}")
    references, values = sides
    replica_errors = {
        holder: relative_difference(references[holder], references[first])
        for holder, first in placed[0].replicas
    }
    whole = placed[0].assemble(references)
    # The last dim of ids counts tokens, which may lie in other passes.
    is_width = declared[1] is not None and whole.is_floating_point()
    if is_width and placed[1].shape[-1:] != tuple(whole.shape[-1:]):
        raise LayoutError(
            f"its layout {call.actual[0].layout!r} assembles {len(values)} parts to shape"
            f" {list(placed[1].shape)}, expected {list(whole.shape)}"
        )
    parts = [
        Part(find_wrong_summand(holders, values, value, reference), value, reference)
        for holders, value, reference in pair_parts(whole, values, placed[1])
    ]
    return parts, replica_errors


def _read_both(
    expected: Dump, actual: Dump, lanes: LanePair, call: HeldCall
) -> tuple[list[Tensor], list[Tensor]]:
    is_parameter = lanes.port.direction == "parameter"
    found = []
    for dump, tensors, span in (
        (expected, call.expected, lanes.expected_span),
        (actual, call.actual, lanes.actual_span),
    ):
        values = [dump.read(one) for one in tensors]
        if span is not None:
            values = [span.of(one, is_parameter=is_parameter) for one in values]
        found.append(values)
    return found[0], found[1]


def _place_declared(
    call: HeldCall, sides: tuple[Sequence[Tensor], Sequence[Tensor]]
) -> tuple[Placement | None, Placement | None]:
    expected, actual = (
        place_declared(tensors, [tuple(one.shape) for one in side])
        for tensors, side in zip((call.expected, call.actual), sides, strict=True)
    )
    return expected, actual
