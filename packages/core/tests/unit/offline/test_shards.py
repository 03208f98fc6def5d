from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from assay.offline.measuring.pair_values import give_comparable
from assay.offline.measuring.placed_parts import (
    Placement,
    PlacementFinder,
    PlacementRule,
    Shape,
    find_wrong_summand,
    list_errors,
    list_fused_rules,
    list_rules,
)

WHOLE = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def find(
    expected: list[Tensor],
    actual: list[Tensor],
    list_candidates: Callable[[Sequence[Shape]], list[PlacementRule]] = list_rules,
) -> tuple[PlacementRule | None, PlacementRule | None] | None:
    finder = PlacementFinder((False, False), list_candidates)
    finder.add_pass((expected, actual), (None, None), lambda *both: give_comparable(None, *both))
    found = finder.find()
    return found.rules if found is not None else None


def rule(actual: list[Tensor]) -> PlacementRule | None:
    found = find([WHOLE], actual)
    assert found is not None
    return found[1]


def place(one: PlacementRule, parts: list[Tensor]) -> Placement:
    placement = one.place([tuple(part.shape) for part in parts])
    assert placement is not None
    return placement


def test_equal_parts_are_replicas() -> None:
    assert rule([WHOLE, WHOLE]) == PlacementRule("replicated")
    placement = place(PlacementRule("replicated"), [WHOLE, WHOLE])
    assert placement.replicas == [(1, 0)]
    assert placement.parts == [(0,), (1,)]
    assert placement.slices[1].cut(WHOLE) is WHOLE


@pytest.mark.parametrize("dim", [-1, -2])
def test_parts_along_a_dim_make_up_the_whole(dim: int) -> None:
    parts = list(WHOLE.split((1, 3) if dim == -2 else (2, 4), dim))
    assert rule(parts) == PlacementRule("sharded", dim)
    placement = place(PlacementRule("sharded", dim), parts)
    assert torch.equal(placement.assemble(parts), WHOLE)
    assert torch.equal(placement.slices[1].cut(WHOLE), parts[1])


def test_consecutive_ranks_may_hold_the_same_shard() -> None:
    one, other = WHOLE.chunk(2, 1)
    parts = [one, one, other, other]
    assert rule(parts) == PlacementRule("sharded", -1, 2)
    assert torch.equal(place(PlacementRule("sharded", -1, 2), parts).assemble(parts), WHOLE)


def test_parts_that_add_up_to_the_whole_are_summands() -> None:
    parts = [WHOLE * 0.25, WHOLE * 0.75]
    assert rule(parts) == PlacementRule("partial")
    placement = place(PlacementRule("partial"), parts)
    assert placement.parts == [(0, 1)]
    assert torch.equal(placement.assemble(parts), WHOLE)


def test_two_shards_and_three_of_one_tensor() -> None:
    two, three = list(WHOLE.chunk(2, 1)), list(WHOLE.chunk(3, 1))
    assert find(two, three) == (PlacementRule("sharded", -1), PlacementRule("sharded", -1))


def test_shards_against_summands() -> None:
    shards, summands = list(WHOLE.chunk(2, 1)), [WHOLE - 7, WHOLE * 0 + 7]
    assert find(shards, summands) == (PlacementRule("sharded", -1), PlacementRule("partial"))
    assert find(summands, shards) == (PlacementRule("partial"), PlacementRule("sharded", -1))


def test_one_wrong_rank_does_not_change_the_placement() -> None:
    assert rule([WHOLE, WHOLE.flip(0)]) == PlacementRule("replicated")
    first, second = WHOLE.chunk(2, 1)
    assert rule([first, second * 1.5]) == PlacementRule("sharded", -1)
    assert find([WHOLE, WHOLE.flip(0)], [WHOLE]) == (
        PlacementRule("replicated"),
        PlacementRule("replicated"),
    )


def test_a_lost_replica_is_not_a_summand() -> None:
    """A tensor of zeros would complete a sum, so a sum needs more evidence than its values."""
    assert rule([WHOLE, WHOLE * 0]) == PlacementRule("replicated")


def test_parts_that_fit_no_placement_have_none() -> None:
    assert find([WHOLE], [WHOLE[:, :2], WHOLE[:, 2:5]]) is None
    assert list_rules([(4, 2), (3, 3)]) == []


def test_every_replica_of_expected_is_an_error_of_its_own() -> None:
    placement = place(PlacementRule("replicated"), [WHOLE, WHOLE])
    single = place(PlacementRule("replicated"), [WHOLE])
    sides = [WHOLE, WHOLE * 1.5], [WHOLE]
    found = list_errors(sides, placement, single, lambda *both: both)
    assert list(found) == [pytest.approx(0.5), 0.0]


@pytest.mark.parametrize("factor", [0.0, 1.05])
def test_the_wrong_summand_is_the_one_that_explains_the_error(factor: float) -> None:
    summands = [WHOLE, WHOLE.flip(0).exp(), WHOLE.flip(1)]
    wrong = [summands[0], summands[1] * factor, summands[2]]
    total = sum(wrong, WHOLE * 0)
    assert find_wrong_summand((0, 1, 2), wrong, total, sum(summands, WHOLE * 0)) == 1


@pytest.mark.parametrize("sections", [(1, 1), (1, 1, 1), (4, 1, 1)])
@pytest.mark.parametrize("num", [2, 4])
def test_ranks_hold_a_shard_of_each_fused_projection(sections: tuple[int, ...], num: int) -> None:
    projections = [torch.randn(5, 8 * share) for share in sections]
    whole = torch.cat(projections, -1)
    parts = [
        torch.cat([one.chunk(num, -1)[rank] for one in projections], -1) for rank in range(num)
    ]
    fused = PlacementRule("sharded", -1, 1, sections)
    assert find([whole], parts, list_fused_rules) == (PlacementRule("replicated"), fused)
    assert torch.equal(place(fused, parts).assemble(parts), whole)
    assert torch.equal(place(fused, parts).slices[1].cut(whole), parts[1])
    # A fault on one rank does not change the placement.
    wrong = [parts[0], parts[1] * 1.5, *parts[2:]]
    assert find([whole], wrong, list_fused_rules) == (PlacementRule("replicated"), fused)
