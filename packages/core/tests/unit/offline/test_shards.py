import torch
from torch import Tensor

from assay.offline.measuring.shards import Placement, find_placements

WHOLE = torch.arange(24.0).reshape(4, 6)
BATCH = torch.arange(48.0).reshape(2, 4, 6)


def placements(expected: list[Tensor], actual: list[Tensor]) -> tuple[Placement, Placement]:
    found = find_placements(expected, actual)
    assert found is not None
    return found


def test_equal_parts_are_replicas() -> None:
    _, placement = placements([WHOLE], [WHOLE, WHOLE])
    assert placement == Placement("replicated")
    assert placement.part(WHOLE, 1) is WHOLE


def test_parts_along_a_dim_make_up_the_whole() -> None:
    parts = [WHOLE[:, :2], WHOLE[:, 2:]]
    _, placement = placements([WHOLE], parts)
    assert placement == Placement("sharded", 1, (2, 4))
    assert torch.equal(placement.assemble(parts), WHOLE)
    assert torch.equal(placement.part(WHOLE, 1), parts[1])


def test_rows_of_a_weight_may_be_divided() -> None:
    assert placements([WHOLE], [WHOLE[:2], WHOLE[2:]])[1] == Placement("sharded", 0, (2, 2))


def test_different_parts_of_the_whole_shape_are_summands() -> None:
    parts = [WHOLE * 0.25, WHOLE * 0.75]
    _, placement = placements([WHOLE], parts)
    assert placement == Placement("partial")
    assert torch.equal(placement.assemble(parts), WHOLE)


def test_two_shards_and_three_of_one_tensor() -> None:
    two, three = list(WHOLE.chunk(2, 1)), list(WHOLE.chunk(3, 1))
    assert placements(two, three) == (
        Placement("sharded", 1, (3, 3)), Placement("sharded", 1, (2, 2, 2)),
    )  # fmt: skip


def test_shards_against_summands() -> None:
    shards, summands = list(WHOLE.chunk(2, 1)), [WHOLE - 7, WHOLE * 0 + 7]
    assert [one.kind for one in placements(shards, summands)] == ["sharded", "partial"]
    assert [one.kind for one in placements(summands, shards)] == ["partial", "sharded"]


def test_another_batch_size_is_no_shard() -> None:
    parts = list(BATCH[:1].chunk(2, 2))
    assert placements([BATCH], parts)[1] == Placement("sharded", 2, (3, 3))


def test_parts_that_fit_no_placement_have_none() -> None:
    assert find_placements([WHOLE], [WHOLE[:, :2], WHOLE[:, 2:5]]) is None
    assert find_placements([WHOLE], [WHOLE, WHOLE[0]]) is None
