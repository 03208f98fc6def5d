"""Operations of two ranks, put together as the reference's."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from assay.locating.rank_operations import put_together
from assay.recording.operations import Operation

WHOLE, PART = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(0))


def operation(name: str, *outputs: Tensor) -> Operation:
    return Operation(name, f"aten.{name}.default", outputs)


def collective(name: str, *outputs: Tensor) -> Operation:
    return Operation(name, f"_c10d_functional.{name}.default", outputs)


def summed(summand: Tensor, total: Tensor) -> list[Operation]:
    """A row-parallel product on one rank."""
    return [
        operation("linear", summand),
        collective("all_reduce"),
        collective("wait_tensor", total),
    ]


def names_and_values(of_ranks: Sequence[Sequence[Operation]]) -> list[tuple[str, Tensor]]:
    expected = [operation("linear", WHOLE)]
    sides = put_together(of_ranks, expected, expected)
    assert sides is not None
    actual, yardstick, noise = sides
    names = [one.name for one in actual]
    assert [one.name for one in yardstick] == [one.name for one in noise] == names
    assert all(one.outputs == (WHOLE,) for one in yardstick)
    return [(one.name, one.outputs[0]) for one in actual]


def test_one_process_stays_as_it_is() -> None:
    own = [operation("mul", WHOLE)]
    assert put_together([own], own, []) == (own, own, [])


@pytest.mark.parametrize("dim", [0, 1])
def test_features_of_all_ranks_are_concatenated(dim: int) -> None:
    sizes = [1, 2] if dim == 0 else [6, 6]
    ((name, value),) = names_and_values(
        [[operation("linear", part)] for part in WHOLE.split(sizes, dim)]
    )

    assert name == "linear"
    assert torch.equal(value, WHOLE.double())


def test_parts_of_fused_weights_come_in_the_order_of_the_whole() -> None:
    first, second = WHOLE.chunk(2, 1)
    ranks = [torch.cat([first[:, a], second[:, a]], 1) for a in (slice(0, 3), slice(3, 6))]

    ((_, value),) = names_and_values([[operation("linear", one)] for one in ranks])

    assert torch.equal(value, WHOLE.double())


def test_summands_are_added_and_their_sum_is_an_operation_of_its_own() -> None:
    both = names_and_values([summed(PART, WHOLE), summed(WHOLE - PART, WHOLE)])

    assert [name for name, _ in both] == ["linear", "all_reduce"]
    assert all(torch.allclose(value, WHOLE.double(), atol=1e-6) for _, value in both)


def test_summand_of_zeros_is_a_summand() -> None:
    """A rank without a token for its experts adds nothing."""
    both = names_and_values([summed(WHOLE, WHOLE), summed(torch.zeros_like(WHOLE), WHOLE)])

    assert [name for name, _ in both] == ["linear", "all_reduce"]
    assert all(torch.equal(value, WHOLE.double()) for _, value in both)


def test_sum_that_one_rank_does_not_take_over_is_the_wrong_operation() -> None:
    (_, product), (_, total) = names_and_values([summed(PART, WHOLE), summed(WHOLE - PART, PART)])

    assert torch.allclose(product, WHOLE.double(), atol=1e-6)
    assert torch.equal(total, PART.double())


def test_value_that_is_wrong_on_one_rank_is_taken_from_it() -> None:
    wrong = WHOLE * 1.02
    ((_, value),) = names_and_values([[operation("linear", one)] for one in (WHOLE, wrong)])

    assert torch.equal(value, wrong.double())


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_with_a_nan_is_the_one_that_is_shown(rank: int) -> None:
    values = [WHOLE, WHOLE]
    values[rank] = WHOLE * torch.nan

    ((_, value),) = names_and_values([[operation("linear", one)] for one in values])

    assert bool(value.isnan().all())


def test_shapes_that_do_not_fit_are_left_out() -> None:
    copied = [[operation("linear", WHOLE[:, :8])], [operation("linear", WHOLE[:, 4:])]]
    assert names_and_values(copied) == []


def test_ranks_that_run_other_operations_are_not_put_together() -> None:
    linear, expected = [operation("linear", WHOLE)], [operation("linear", WHOLE)]

    assert put_together([linear, [*linear, operation("mul", WHOLE)]], expected, expected) is None


def test_operation_that_the_reference_lacks_is_kept() -> None:
    own = [operation("mul", WHOLE), operation("linear", WHOLE)]
    expected = [operation("linear", WHOLE)]

    sides = put_together([own, own], expected, expected)

    assert sides is not None
    assert [[one.name for one in side] for side in sides] == [
        ["mul", "linear"],
        ["linear"],
        ["linear"],
    ]


def test_attention_is_one_operation_where_it_is_written_out() -> None:
    fused = [operation("scaled_dot_product_attention", WHOLE[:, :6])]
    other = [operation("scaled_dot_product_attention", WHOLE[:, 6:])]
    written = [operation("matmul", WHOLE), operation("softmax", WHOLE), operation("matmul", WHOLE)]

    sides = put_together([fused, other], written, written)

    assert sides is not None
    assert [one.name for one in sides[0]] == ["scaled_dot_product_attention"]
    assert torch.equal(sides[0][0].outputs[0], WHOLE.double())
