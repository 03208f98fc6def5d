"""Which operation of a stage is the first that is wrong, also from the operations of two ranks."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from assay.judge.limits import load_limits
from assay.recording.modules import Operation
from assay.replay.operations import WrongOperation, find_wrong_operation, put_together
from assay.sites import RowMap

LIMITS = load_limits()
UNIT = 2.0**-8


def operation(name: str, *outputs: Tensor) -> Operation:
    return Operation(name, f"aten.{name}.default", outputs)


@pytest.fixture
def values(tensor: Callable[..., Tensor]) -> dict[str, Tensor]:
    """What a gated projection computes: linear, silu, mul, each (1, 64, 32)."""
    names = ("linear", "silu", "mul")
    return {name: tensor(1, 64, 32, seed=seed) for seed, name in enumerate(names)}


def run(values: dict[str, Tensor], **factors: float) -> list[Operation]:
    """The operations in bfloat16, some of them scaled."""
    return [
        operation(name, (value * factors.get(name, 1.0)).bfloat16())
        for name, value in values.items()
    ]


def find(
    actual: list[Operation], values: dict[str, Tensor], rows: RowMap | None = None
) -> WrongOperation | None:
    expected = [operation(name, value) for name, value in values.items()]
    return find_wrong_operation(actual, expected, run(values), LIMITS, UNIT, rows)


def test_operation_in_float32_is_held_to_the_noise_of_float32(values: dict[str, Tensor]) -> None:
    expected = [operation(name, value.double()) for name, value in values.items()]
    noise = [operation(name, value.float()) for name, value in values.items()]
    # A tenth of the candidate's bfloat16 rounding, a thousand times that of float32.
    actual = [operation(name, value.float() * (1 + 1e-4)) for name, value in values.items()]

    wrong = find_wrong_operation(actual, expected, noise, LIMITS, UNIT)

    assert wrong is not None
    assert wrong.number == 0
    assert find_wrong_operation(noise, expected, noise, LIMITS, UNIT) is None


def test_same_operations_are_all_right(values: dict[str, Tensor]) -> None:
    assert find(run(values), values) is None


def test_first_of_several_wrong_operations_is_named(values: dict[str, Tensor]) -> None:
    wrong = find(run(values, silu=1.05, mul=1.05), values)

    assert wrong is not None
    assert (wrong.name, wrong.number) == ("silu", 1)
    assert wrong.ratio is not None
    assert wrong.ratio.value > LIMITS.of(wrong.ratio.statistic)


def test_scale_within_the_noise_is_seen_by_a_systematic_statistic(
    values: dict[str, Tensor],
) -> None:
    many = {name: value.repeat(64, 1, 1) for name, value in values.items()}

    wrong = find(run(many, linear=1.002), many)

    assert wrong is not None
    assert wrong.name == "linear"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_value_that_is_not_finite_is_wrong(values: dict[str, Tensor], value: float) -> None:
    actual = run(values)
    actual[1].outputs[0][0, 3, 5] = value

    wrong = find(actual, values)

    assert wrong is not None
    assert wrong.name == "silu"
    assert wrong.ratio is not None
    assert wrong.ratio.statistic == "non-finite"


def test_casts_and_copies_are_no_steps(values: dict[str, Tensor]) -> None:
    actual = run(values)
    cast = operation("_to_copy", torch.full((1, 64, 32), 7.0))
    copy = operation("clone", torch.full((1, 64, 32), 7.0))

    assert find([cast, actual[0], copy, *actual[1:]], values) is None


def test_operation_that_the_reference_lacks_is_named_if_all_others_are_right(
    values: dict[str, Tensor],
) -> None:
    actual = run(values)
    extra = operation("tanh", torch.zeros(1, 64, 32))

    wrong = find([actual[0], extra, *actual[1:]], values)

    assert wrong == WrongOperation("tanh", 1, None)


def test_wrong_values_count_more_than_an_extra_operation(values: dict[str, Tensor]) -> None:
    actual = run(values, mul=1.05)
    extra = operation("tanh", torch.zeros(1, 64, 32))

    wrong = find([extra, *actual], values)

    assert wrong is not None
    assert wrong.name == "mul"


def gated(dtype: torch.dtype, *, fused: str = "", factor: float = 1.0) -> list[Operation]:
    """A gated projection between its children, which are correct; `fused` says how it is written."""
    generator = torch.Generator().manual_seed(0)
    gate, up = torch.randn(2, 4, 64, 32, generator=generator, dtype=torch.float64).to(dtype)
    act = torch.nn.functional.gelu(gate) if fused == "gelu" else torch.nn.functional.silu(gate)
    found = [operation(fused or "silu", act)]
    if fused == "sigmoid":
        found = [operation("sigmoid", gate.sigmoid()), operation("mul", gate * gate.sigmoid())]
    found.append(operation("mul", act * up))
    if factor != 1.0:
        found.append(operation("mul", act * up * factor))
    return found


@pytest.mark.parametrize(
    ("fused", "name", "number"), [("", "mul", 2), ("sigmoid", "mul", 3), ("gelu", None, None)]
)
def test_correct_operations_before_the_wrong_one_are_not_named(
    fused: str, name: str | None, number: int | None
) -> None:
    expected, noise = gated(torch.float64), gated(torch.bfloat16)
    factor = 1.0 if fused == "gelu" else 1.02
    wrong = find_wrong_operation(
        gated(torch.bfloat16, fused=fused, factor=factor), expected, noise, LIMITS, UNIT
    )
    # The result of gelu is wrong, or that of the product with it: without their inputs, none is named.
    assert (wrong and wrong.name, wrong and wrong.number) == (name, number)
    right = find_wrong_operation(
        gated(torch.bfloat16, fused=fused.replace("gelu", "")), expected, noise, LIMITS, UNIT
    )
    assert right is None or right.name == "sigmoid"  # nothing else differs


def test_fused_operation_is_compared_with_the_last_that_it_stands_for(
    values: dict[str, Tensor],
) -> None:
    fused = operation("fused_gate", values["mul"].bfloat16())
    assert find([fused], values) is None

    wrong = find([operation("fused_gate", (1.05 * values["mul"]).bfloat16())], values)
    assert wrong is not None
    assert wrong.name == "fused_gate"


def test_operation_of_another_size_is_no_partner(values: dict[str, Tensor]) -> None:
    actual = run(values)
    actual[1] = operation("silu", torch.zeros(1, 64, 16))

    wrong = find(actual, values)

    assert wrong == WrongOperation("silu", 1, None)


def test_garbage_in_padding_is_no_error(values: dict[str, Tensor]) -> None:
    rows = RowMap((0,), ((-1, *range(63)),))
    actual = run(values)
    actual[0].outputs[0][0, 0] = 1e4

    assert find(actual, values, rows) is None
    assert find(actual, values) is not None


def test_no_operations_are_all_right(values: dict[str, Tensor]) -> None:
    assert find([], values) is None
    assert find_wrong_operation([], [], [], LIMITS, UNIT) is None


def attend(scale: float, *, inside: bool, dtype: torch.dtype = torch.float64) -> list[Operation]:
    """Attention as single operations, which scales its queries and keys, or (inside) their product."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(4, 64, 32, generator=generator, dtype=torch.float64).to(dtype) for _ in "qkv"
    )
    rotated = operation("add", query)
    if inside:
        product = query @ key.mT
        scores = product * scale
        before = [operation("matmul", product), operation("mul", scores)]
    else:
        query, key_t = query * scale**0.5, key.mT * scale**0.5
        scores = query @ key_t
        before = [
            operation("mul", query),
            operation("mul", key_t),
            operation("matmul", scores),
        ]
    shares = scores.softmax(-1)
    after = [operation("softmax", shares), operation("matmul", shares @ value)]
    return [rotated, *before, operation("add", scores + 0.0), *after]


def find_in_attention(actual: list[Operation]) -> WrongOperation | None:
    expected = attend(0.2, inside=True)
    noise = attend(0.2, inside=True, dtype=torch.bfloat16)
    return find_wrong_operation(actual, expected, noise, LIMITS, UNIT)


def test_wrong_scale_of_attention_that_scales_elsewhere_is_attention_s() -> None:
    wrong = find_in_attention(attend(0.3, inside=False, dtype=torch.bfloat16))

    assert wrong is not None
    assert (wrong.name, wrong.number) == ("scaled_dot_product_attention", 1)
    assert find_in_attention(attend(0.2, inside=False, dtype=torch.bfloat16)) is None


def test_a_wrong_softmax_of_right_scores_is_named_itself() -> None:
    right = attend(0.2, inside=True)
    wrong_shares = (1.1 * right[-3].outputs[0]).softmax(-1)
    # One operation more, so that the two sides are not alike.
    actual = [
        operation("neg", wrong_shares),
        *right[:-2],
        operation("softmax", wrong_shares),
        right[-1],
    ]
    wrong = find_in_attention(actual)

    assert wrong is not None
    assert wrong.name == "softmax"


def test_wrong_scale_of_attention_written_out_alike_is_its_product_s() -> None:
    wrong = find_in_attention(attend(0.202, inside=True, dtype=torch.bfloat16))

    assert wrong is not None
    assert wrong.name == "mul"


def test_fused_attention_that_returns_more_than_its_result_is_compared() -> None:
    wrong_scale, right = (
        [all_of[0], all_of[-1]]
        for all_of in (attend(scale, inside=True, dtype=torch.bfloat16) for scale in (0.3, 0.2))
    )
    for side in (wrong_scale, right):
        result = side[1].outputs[0].reshape(2, 2, 64, 32)
        side[1] = Operation(
            "scaled_dot_product_attention", "aten.flash", (result, torch.zeros(2, 2, 64))
        )
    wrong = find_in_attention(wrong_scale)

    assert wrong is not None
    assert wrong.name == "scaled_dot_product_attention"
    assert find_in_attention(right) is None


WHOLE, PART = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(0))


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
    written = [
        operation("matmul", WHOLE),
        operation("softmax", WHOLE),
        operation("matmul", WHOLE),
    ]

    sides = put_together([fused, other], written, written)

    assert sides is not None
    assert [one.name for one in sides[0]] == ["scaled_dot_product_attention"]
    assert torch.equal(sides[0][0].outputs[0], WHOLE.double())
