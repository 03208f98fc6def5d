"""Modules and calls that only one side has, masks in any form, and parts of a batch."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody names it
from torch import Tensor, nn

from assay.replay.ports import (
    BatchSource,
    PartQueue,
    allowed,
    count_differences,
    in_form_of,
    is_attention_mask,
    is_mask_of_pairs_for_padding,
)
from assay.sites import LocalPart, RowMap
from packages.core.tests.unit.replay.conftest import MakeRig, Rig
from packages.core.tests.unit.replay.plants import replace_forward


def test_child_that_is_never_called_is_replaced_by_its_ancestor(llama_rig: Rig) -> None:
    def forward(module: Any, _original: Any, x: Tensor) -> Any:
        gated = F.silu(F.linear(x, module.gate_proj.weight)) * F.linear(x, module.up_proj.weight)
        return F.linear(gated, module.down_proj.weight)

    results = llama_rig.replay(replace_forward("model.layers.0.mlp", forward))

    assert sorted(results.uncalled_modules) == [
        f"model.layers.0.mlp.{name}" for name in ("act_fn", "down_proj", "gate_proj", "up_proj")
    ]
    assert results.unmatched_expected == []


def test_error_inside_of_a_replaced_child_is_found_at_its_ancestor(llama_rig: Rig) -> None:
    def forward(module: Any, _original: Any, x: Tensor) -> Any:
        gated = F.silu(F.linear(x, module.gate_proj.weight)) * F.linear(x, module.up_proj.weight)
        return F.linear(gated, 1.1 * module.down_proj.weight)

    plant = replace_forward("model.layers.0.mlp", forward)

    assert llama_rig.failed(plant) == {"model.layers.0.mlp"}


def test_layer_that_is_skipped_is_an_error_of_the_model(llama_rig: Rig) -> None:
    def plant(model: Any) -> None:
        del model.model.layers[1]
        model.config.num_hidden_layers = 1
        model.model.config.num_hidden_layers = 1

    assert "model" in llama_rig.failed(plant)


def test_decode_steps_that_are_not_made_are_missing(
    make_rig: MakeRig, tensor: Callable[..., Tensor]
) -> None:
    steps = [3]
    x = tensor(1, 4, 8)

    def loop(model: Any) -> None:
        for _ in range(steps[0]):
            model(x.to(next(model.parameters()).dtype))

    rig = make_rig(nn.Sequential(nn.Linear(8, 8)), loop)
    assert rig.replay().unmatched_expected == []
    steps[0] = 2

    assert rig.replay().unmatched_expected == ["(model)", "0"]


def test_calls_beyond_those_of_the_reference_are_listed(
    make_rig: MakeRig, tensor: Callable[..., Tensor]
) -> None:
    steps = [1]
    x = tensor(1, 4, 8)

    def loop(model: Any) -> None:
        for _ in range(steps[0]):
            model(x.to(next(model.parameters()).dtype))

    rig = make_rig(nn.Sequential(nn.Linear(8, 8)), loop)
    rig.replay()
    steps[0] = 2

    assert rig.replay().unmatched_actual == ["(model)", "0"]


# One prompt of two tokens, padded by one, and one of three: query t of row b sees column s.
ALLOWED = torch.tensor(
    [
        [[[False, False, False], [False, True, False], [False, True, True]]],
        [[[True, False, False], [True, True, False], [True, True, True]]],
    ]
)
ROWS = RowMap((0, 1), ((-1, 0, 1), (0, 1, 2)))
CAUSAL = torch.ones(3, 3, dtype=torch.bool).tril()[None, None]


def additive(allowed_columns: Tensor, dtype: torch.dtype, lowest: float | None = None) -> Tensor:
    lowest = torch.finfo(dtype).min if lowest is None else lowest
    return torch.zeros(allowed_columns.shape, dtype=dtype).masked_fill(~allowed_columns, lowest)


FORMS = {
    "bool": ALLOWED,
    "int": ALLOWED.long(),
    "float32": additive(ALLOWED, torch.float32),
    "bfloat16": additive(ALLOWED, torch.bfloat16),
    "float16": additive(ALLOWED, torch.float16),
    "minus infinity": additive(ALLOWED, torch.float32, -math.inf),
    # A reference in float64 rounds the inputs of its modules to the candidate's dtype.
    "float32 in float64": additive(ALLOWED, torch.float32).double(),
    "float16 in float32": additive(ALLOWED, torch.float16).float(),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_every_form_of_one_mask_means_the_same(form: Tensor) -> None:
    assert torch.equal(allowed(form), ALLOWED)


@pytest.mark.parametrize("actual", FORMS.values(), ids=list(FORMS))
@pytest.mark.parametrize("expected", FORMS.values(), ids=list(FORMS))
def test_forms_of_one_mask_do_not_differ(actual: Tensor, expected: Tensor) -> None:
    # Five queries are no padding, each sees or does not see three columns.
    assert count_differences(actual, expected, ROWS)[:2] == (15, 0)


def test_lost_padding_and_a_shifted_diagonal_are_counted() -> None:
    lost_padding = CAUSAL.expand(2, 1, 3, 3)
    shifted = ALLOWED & torch.ones(3, 3, dtype=torch.bool).tril(-1)

    # Row 0: its two queries see the padding. Row 1 is the same.
    assert count_differences(lost_padding, ALLOWED, ROWS)[:2] == (15, 2)
    # Each of five queries loses its own column.
    assert count_differences(shifted, ALLOWED, ROWS)[:2] == (15, 5)


def test_first_query_with_other_keys_has_a_prompt_and_a_position() -> None:
    lost_padding = CAUSAL.expand(2, 1, 3, 3)
    changed = ALLOWED.clone()
    changed[1, 0, 2, 2] = False

    # Row 0 has one token of padding: its first query has position 0.
    assert count_differences(lost_padding, ALLOWED, ROWS).first == (ROWS.prompts[0], 0)
    assert count_differences(changed, ALLOWED, ROWS).first == (ROWS.prompts[1], 2)
    assert count_differences(changed, ALLOWED, None).first == (-1, -1)


def test_padding_queries_may_see_anything() -> None:
    other = ALLOWED.clone()
    other[0, 0, 0] = True

    assert count_differences(other, ALLOWED, ROWS)[:2] == (15, 0)
    assert count_differences(other, ALLOWED, None)[:2] == (18, 3)


def test_empty_slots_of_a_static_cache_are_not_compared_unless_a_query_sees_one() -> None:
    slots = torch.zeros(2, 1, 3, 2, dtype=torch.bool)
    mask = torch.cat([ALLOWED, slots], -1)
    assert count_differences(additive(mask, torch.bfloat16), ALLOWED, ROWS)[:2] == (15, 0)
    mask[1, 0, 2, 4] = True
    assert count_differences(mask, ALLOWED, ROWS)[:2] == (15, 15)


def test_no_mask_is_the_causal_one() -> None:
    causal = CAUSAL.expand(1, 1, 3, 3)

    assert count_differences(None, causal, None)[:2] == (9, 0)
    assert count_differences(None, ALLOWED, ROWS)[:2] == (15, 2)


def test_no_mask_is_the_full_one_where_the_reference_sees_every_key() -> None:
    full = torch.ones(1, 1, 3, 3, dtype=torch.bool)

    assert count_differences(None, full, None)[:2] == (9, 0)
    assert count_differences(None, additive(full, torch.float32), None)[:2] == (9, 0)


def test_no_mask_of_a_decode_step_sees_every_key() -> None:
    assert count_differences(None, torch.ones(1, 1, 1, 5, dtype=torch.bool), None)[:2] == (5, 0)
    window = torch.tensor([[[[False, False, True, True, True]]]])
    assert count_differences(None, window, None)[:2] == (5, 2)


def test_mask_for_all_heads_is_that_of_each() -> None:
    by_head = ALLOWED.expand(2, 4, 3, 3)

    compared, different, _ = count_differences(by_head, ALLOWED, ROWS)

    assert (compared, different) == (15, 0) or different == compared > 0


@pytest.mark.parametrize("shape", [(2, 3, 3), (2, 4, 3, 3), (2, 4, 2, 3, 3)])
def test_masks_without_heads_and_of_several_streams_are_compared(shape: tuple[int, ...]) -> None:
    expected = ALLOWED.view(2, *[1] * (len(shape) - 3), 3, 3).expand(shape).clone()
    changed = expected.clone()
    changed[1, ..., 2, 2] = False
    copies = changed.numel() // 18

    assert count_differences(expected, expected, ROWS)[:2] == (15 * copies, 0)
    found = count_differences(changed, expected, ROWS)
    assert found[:2] == (15 * copies, copies)
    assert found.first == (ROWS.prompts[1], 2)


def test_mask_of_another_length_differs_everywhere() -> None:
    assert count_differences(ALLOWED[..., :2], ALLOWED, ROWS)[:2] == (15, 15)


@pytest.mark.parametrize("actual", FORMS.values(), ids=list(FORMS))
def test_replacement_has_the_form_of_what_it_replaces(actual: Tensor) -> None:
    expected = additive(ALLOWED, torch.float32)

    replaced = in_form_of(actual, expected)

    assert replaced.dtype is actual.dtype
    assert torch.equal(allowed(replaced), ALLOWED)
    assert bool(replaced.isfinite().all()) or actual.isinf().any()


@pytest.mark.parametrize(
    ("port", "shape", "expected"),
    [
        ("input.attention_mask", (2, 1, 3, 3), True),
        ("input.causal_mask", (2, 1, 3, 3), True),
        ("input.attention_mask.full_attention", (2, 1, 3, 3), True),
        ("indexer:input.attention_mask", (2, 3, 3), True),
        ("input.extended_predict_attention_mask", (2, 4, 2, 3, 6), True),
        ("input.attention_mask", (2, 3), False),
        ("input.hidden_states", (2, 1, 3, 3), False),
        ("input.masked_states", (2, 1, 3, 3), False),
    ],
)
def test_mask_is_recognised_by_name_and_shape(
    port: str, shape: tuple[int, ...], *, expected: bool
) -> None:
    assert is_attention_mask(port, torch.zeros(shape)) is expected


def test_one_number_for_all_allowed_pairs_is_a_mask() -> None:
    # EoMT adds 1 to the scores of all keys that a query sees.
    mask = torch.ones(1, 1, 3, 3).masked_fill(~CAUSAL, torch.finfo(torch.float32).min)

    assert is_attention_mask("input.attention_mask", mask)


@pytest.mark.parametrize(
    "biases",
    [
        -0.5 * torch.arange(9.0).reshape(1, 1, 3, 3),
        torch.zeros(1, 1, 3, 3).masked_fill(~CAUSAL, -10_000.0),
        torch.rand(1, 1, 3, 3),
        torch.ones(1, 1, 3, 3),
    ],
    ids=["distances", "a mask of -10,000", "positive", "a factor"],
)
def test_values_that_are_no_mask_are_compared_as_values(biases: Tensor) -> None:
    # By what they allow they would all be the same, and would be replaced by zeros.
    assert not is_attention_mask("input.attention_mask", biases)


@pytest.mark.parametrize(
    ("port", "actual", "expected", "other_form"),
    [
        ("input.attention_mask", ALLOWED, torch.ones(2, 3), True),
        ("model:input.attention_mask", ALLOWED, torch.ones(2, 3), True),
        ("input.attention_mask", torch.ones(2, 3), torch.ones(2, 3), False),
        ("input.attention_mask", ALLOWED, ALLOWED, False),
        ("input.position_ids", ALLOWED, torch.ones(2, 3), False),
    ],
)
def test_pairs_in_place_of_padding_are_another_form(
    port: str, actual: Tensor, expected: Tensor, *, other_form: bool
) -> None:
    assert is_mask_of_pairs_for_padding(port, actual, tuple(expected.shape)) is other_form


ROW_MAP = RowMap((3, 5), ((-1, 0, 1), (0, 1, 2)))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 3, 4), (1, 3, 4)),
        ((2, 5, 3, 4), (1, 5, 3, 4)),
        ((6, 4), (3, 4)),
        ((1, 3, 4), (1, 3, 4)),
        ((7,), (7,)),
    ],
    ids=["states", "cache", "flattened", "shared by all", "without rows"],
)
def test_single_row_selects_its_part(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    source = BatchSource(0, row=1)
    values = torch.arange(float(torch.Size(shape).numel())).reshape(shape)

    part = source.select(values, ROW_MAP)

    assert tuple(part.shape) == expected == source.selected_shape(shape, ROW_MAP)
    if shape != expected:
        assert torch.equal(part.reshape(-1), values.reshape(-1)[values.numel() // 2 :])
    assert source.select_rows(ROW_MAP) == RowMap((5,), ((0, 1, 2),))


def test_whole_batch_selects_everything() -> None:
    values = torch.zeros(2, 3, 4)

    assert BatchSource(0).select(values, ROW_MAP) is values
    assert BatchSource(0).select_rows(ROW_MAP) is ROW_MAP


class TwoRanks:
    """The layout of a rank whose neighbor has the negated part."""

    def __init__(self) -> None:
        self.exchanges: list[list[str]] = []

    def whole(self, parts: Sequence[LocalPart]) -> list[Tensor]:
        self.exchanges.append([part.module for part in parts])
        return [torch.cat([part.local, -part.local], -1) for part in parts]


def test_parts_of_many_ports_are_exchanged_at_once_as_they_were_when_added() -> None:
    layout: Any = TwoRanks()
    queue = PartQueue()
    measured: list[Tensor] = []
    local = torch.ones(1, 2)
    for module in ("q_proj", "k_proj"):
        queue.add(layout, LocalPart(module, "output", local, (1, 4)), measured.append)
        local += 1  # as an in-place operation of the model
    assert measured == []

    queue.flush()
    queue.flush()

    assert layout.exchanges == [["q_proj", "k_proj"]]
    assert [whole.tolist() for whole in measured] == [[[1, 1, -1, -1]], [[2, 2, -2, -2]]]


def test_large_parts_do_not_wait_for_others() -> None:
    layout: Any = TwoRanks()
    queue = PartQueue()
    measured: list[Tensor] = []
    for module in ("q_proj", "k_proj"):
        part = LocalPart(module, "output", torch.ones(512, 512), (512, 1024))
        queue.add(layout, part, measured.append)

    assert layout.exchanges == [["q_proj"], ["k_proj"]]
    assert len(measured) == 2
