"""Expected shares are worked out by hand; the properties hold for whatever is generated."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assay.errors import UsageError
from assay.parallel.rank_boundaries import (
    Division,
    HeadsError,
    HeadShare,
    check_every_rank_has_some,
    divide_by_heads,
    divide_evenly,
    fuse,
    share_heads,
)


@given(size=st.integers(1, 200), num_ranks=st.integers(1, 20))
def test_even_parts_are_the_chunks_of_torch(size: int, num_ranks: int) -> None:
    # What `Shard` uses: chunks, and nothing for ranks that get none.
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(num_ranks)]
    division = divide_evenly(size, num_ranks)
    actual = [division.features_of(rank) for rank in range(num_ranks)]
    assert actual == chunks + [[]] * (num_ranks - len(chunks))
    assert division.is_even


def test_heads_become_their_features_in_the_order_of_the_rank() -> None:
    division = divide_by_heads(3, 2, [[0, 1], [2, 1]])
    assert division == Division(6, ((range(4),), (range(4, 6), range(2, 4))))
    assert division.features_of(1) == [4, 5, 2, 3]
    assert not division.is_even


def test_parts_of_fused_weights_are_divided_separately() -> None:
    # Two query heads and one key/value head of 2 features, on 2 ranks.
    query = divide_by_heads(2, 2, [[0], [1]])
    kv = divide_by_heads(1, 2, [[0], [0]])
    fused = fuse(query, kv, kv)
    assert fused.size == 8
    assert fused.features_of(0) == [0, 1, 4, 5, 6, 7]
    assert fused.features_of(1) == [2, 3, 4, 5, 6, 7]
    assert [fused.copies()[feature] for feature in range(8)] == [1, 1, 1, 1, 2, 2, 2, 2]


def test_fused_weights_of_one_rank_are_one_even_part() -> None:
    assert fuse(divide_evenly(3, 1), divide_evenly(3, 1)).is_even


def test_halves_of_a_fused_weight_are_not_even_parts() -> None:
    fused = fuse(divide_evenly(4, 2), divide_evenly(4, 2))
    assert fused.features_of(0) == [0, 1, 4, 5]
    assert not fused.is_even


def test_rank_without_features_is_refused_with_the_numbers() -> None:
    # Chunks of 3: ranks 0 to 2 take all 9.
    with pytest.raises(UsageError) as caught:
        check_every_rank_has_some("model.embed_tokens", divide_evenly(9, 4))
    assert str(caught.value) == (
        "model.embed_tokens: 9 features over 4 tensor-parallel ranks leave none for rank 3"
    )


def test_ranks_with_some_features_each_are_accepted() -> None:
    check_every_rank_has_some("lm_head", divide_evenly(8, 3))


# Divisors only: every combination of them can be distributed.
CONFIGURATIONS = [
    (group * num_kv, num_kv, num_ranks)
    for group, num_kv, num_ranks in product(
        (1, 2, 3, 4, 5, 6, 7, 8, 12), (1, 2, 3, 4, 5, 6, 8), range(1, 33)
    )
    if (group * num_kv) % num_ranks == 0
]


def wrong_shares(
    shares: tuple[HeadShare, ...], num_query_heads: int, num_kv_heads: int
) -> list[str]:
    """What is wrong with how heads are distributed, by the definition of grouped-query attention."""
    wrong = []
    query_heads = [head for share in shares for head in share.query_heads]
    if sorted(query_heads) != [*range(num_query_heads)]:
        wrong.append("the ranks' query heads are no permutation of all")
    heads_of_kv = num_query_heads // num_kv_heads
    for rank, share in enumerate(shares):
        for place, head in enumerate(share.query_heads):
            # What attention does on the rank: its key/value heads are repeated group_size times.
            used = share.kv_heads[place // share.group_size]
            if used != head // heads_of_kv:
                wrong.append(f"query head {head} on rank {rank} uses key/value head {used}")
    if {head for share in shares for head in share.kv_heads} != {*range(num_kv_heads)}:
        wrong.append("the ranks' key/value heads are not all")
    if len({(len(share.query_heads), len(share.kv_heads)) for share in shares}) != 1:
        wrong.append("the ranks have different numbers of heads")
    return wrong


def test_there_are_hundreds_of_configurations_with_replicated_and_irregular_ones() -> None:
    replicated = [c for c in CONFIGURATIONS if c[2] > c[1]]
    irregular = [c for c in CONFIGURATIONS if c[2] % c[1] and c[1] % c[2]]
    assert len(CONFIGURATIONS) > 300
    assert len(replicated) > 100
    assert len(irregular) > 50


@pytest.mark.parametrize(("num_query_heads", "num_kv_heads", "num_ranks"), CONFIGURATIONS)
def test_query_heads_find_their_key_value_heads_on_their_own_rank(
    num_query_heads: int, num_kv_heads: int, num_ranks: int
) -> None:
    shares = share_heads(num_query_heads, num_kv_heads, num_ranks)
    assert len(shares) == num_ranks
    assert wrong_shares(shares, num_query_heads, num_kv_heads) == []


@given(num_kv_heads=st.integers(1, 64), group=st.integers(1, 64), num_ranks=st.integers(1, 256))
def test_any_numbers_are_distributed_or_refused(
    num_kv_heads: int, group: int, num_ranks: int
) -> None:
    num_query_heads = num_kv_heads * group
    if num_query_heads % num_ranks:
        with pytest.raises(HeadsError, match=f"{num_query_heads} query heads .* {num_ranks} "):
            share_heads(num_query_heads, num_kv_heads, num_ranks)
    else:
        shares = share_heads(num_query_heads, num_kv_heads, num_ranks)
        assert wrong_shares(shares, num_query_heads, num_kv_heads) == []


@given(num_kv_heads=st.integers(1, 16), group=st.integers(1, 16), num_ranks=st.integers(1, 16))
def test_no_key_value_head_is_held_twice_where_ranks_divide_them(
    num_kv_heads: int, group: int, num_ranks: int
) -> None:
    shares = share_heads(num_kv_heads * num_ranks * group, num_kv_heads * num_ranks, num_ranks)
    held = [head for share in shares for head in share.kv_heads]
    assert held == [*range(num_kv_heads * num_ranks)]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        pytest.param(
            (8, 2, 2),
            [HeadShare((0, 1, 2, 3), (0,)), HeadShare((4, 5, 6, 7), (1,))],
            id="a-key-value-head-each",
        ),
        pytest.param(
            (4, 2, 4),
            [
                HeadShare((0,), (0,)),
                HeadShare((1,), (0,)),
                HeadShare((2,), (1,)),
                HeadShare((3,), (1,)),
            ],
            id="two-ranks-hold-the-same",
        ),
        pytest.param(
            (6, 2, 3),
            [HeadShare((0, 1), (0, 0)), HeadShare((2, 3), (0, 1)), HeadShare((4, 5), (1, 1))],
            id="the-middle-rank-needs-both",
        ),
    ],
)
def test_shares_are_as_worked_out_by_hand(
    numbers: tuple[int, int, int], expected: list[HeadShare]
) -> None:
    assert [*share_heads(*numbers)] == expected


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (
            (6, 4, 2),
            "6 query heads cannot share 4 key/value heads evenly: 6 is not a multiple of 4",
        ),
        (
            (6, 2, 4),
            (
                "6 query heads cannot be distributed evenly over 4 tensor-parallel ranks: "
                "6 is not a multiple of 4"
            ),
        ),
        ((8, 0, 2), "num_kv_heads is 0; it must be at least 1"),
        ((8, 2, -1), "num_ranks is -1; it must be at least 1"),
        ((0, 1, 1), "num_query_heads is 0; it must be at least 1"),
    ],
)
def test_impossible_distribution_is_refused_with_its_numbers(
    numbers: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(HeadsError) as caught:
        share_heads(*numbers)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("broken", "finding"),
    [
        pytest.param(
            (HeadShare((0, 1), (0,)), HeadShare((2, 2), (1,))),
            "the ranks' query heads are no permutation of all",
            id="a-head-is-computed-twice",
        ),
        pytest.param(
            (HeadShare((0, 2), (0,)), HeadShare((1, 3), (1,))),
            "query head 2 on rank 0 uses key/value head 0",
            id="dealt-out-in-turn",
        ),
        pytest.param(
            (HeadShare((0, 1), (0,)), HeadShare((2, 3), (0,))),
            "the ranks' key/value heads are not all",
            id="every-rank-holds-the-first",
        ),
        pytest.param(
            (HeadShare((0, 1), (0,)), HeadShare((2, 3), (1, 1))),
            "the ranks have different numbers of heads",
            id="ranks-differ",
        ),
    ],
)
def test_wrong_distribution_is_detected(broken: tuple[HeadShare, ...], finding: str) -> None:
    assert finding in wrong_shares(broken, 4, 2)
