import torch

from assay.offline.shards import Placement, find_placement

WHOLE = torch.arange(24.0).reshape(4, 6)


def test_equal_parts_are_replicas() -> None:
    placement = find_placement([WHOLE, WHOLE], (4, 6))
    assert placement == Placement("replicated")
    assert placement.part(WHOLE, 1) is WHOLE


def test_parts_along_a_dim_make_up_the_whole() -> None:
    parts = [WHOLE[:, :2], WHOLE[:, 2:]]
    placement = find_placement(parts, (4, 6))
    assert placement == Placement("sharded", 1, (2, 4))
    assert torch.equal(placement.assemble(parts), WHOLE)
    assert torch.equal(placement.part(WHOLE, 1), parts[1])


def test_the_whole_shape_tells_along_which_dim() -> None:
    assert find_placement([WHOLE[:2], WHOLE[2:]], (4, 6)) == Placement("sharded", 0, (2, 2))
    assert find_placement([WHOLE[:2], WHOLE[2:]], (2, 12)) == Placement("sharded", 1, (6, 6))


def test_different_parts_of_the_whole_shape_are_summands() -> None:
    parts = [WHOLE * 0.25, WHOLE * 0.75]
    placement = find_placement(parts, (4, 6))
    assert placement == Placement("partial")
    assert torch.equal(placement.assemble(parts), WHOLE)


def test_parts_that_fit_no_placement_have_none() -> None:
    assert find_placement([WHOLE[:, :2], WHOLE[:, 2:5]], (4, 6)) is None
    assert find_placement([WHOLE, WHOLE[0]], (4, 6)) is None
