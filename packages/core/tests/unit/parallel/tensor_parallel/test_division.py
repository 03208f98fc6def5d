import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assay.errors import UsageError
from assay.parallel.tensor_parallel.division import (
    Division,
    check_every_rank_has_some,
    divide_by_heads,
    divide_evenly,
    fuse,
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
