"""Alignment of tokens: passes, prompts, positions, ids."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from assay.comparison.pairing.passes import (
    Pass,
    PassPair,
    TokenComparison,
    align_passes,
    compare_ids,
    find_passes,
    match_rows,
    take_rows,
)
from assay.sites import CallSite, RowMap
from packages.core.tests.unit.comparison.memory_dump import Values, make_dump

IDS = ("embed", "input.0")


def passes_of(*ids: list[list[int]]) -> list[Pass]:
    return find_passes(make_dump({(*IDS, step): torch.tensor(one) for step, one in enumerate(ids)}))


def rows_of(one: Pass) -> RowMap:
    assert one.rows is not None
    return one.rows


def test_a_decode_step_follows_the_prefill() -> None:
    prefill, decode = passes_of([[5, 6, 7]], [[8]])
    assert rows_of(prefill).positions == ((0, 1, 2),)
    assert rows_of(decode).positions == ((3,),)


def test_the_second_part_of_a_chunked_prefill_continues_the_first() -> None:
    _, second = passes_of([[5, 6, 7]], [[8, 9]])
    assert rows_of(second).positions == ((3, 4),)


def test_the_same_prefill_twice_starts_at_zero_twice() -> None:
    first, second = passes_of([[5, 6, 7]], [[5, 6, 7]])
    assert rows_of(first).positions == rows_of(second).positions


def test_a_prefill_after_decode_steps_is_another_prompt() -> None:
    assert rows_of(passes_of([[5, 6]], [[7]], [[8, 9]])[2]).positions == ((0, 1),)


def test_recorded_positions_and_padding_are_used() -> None:
    dump = make_dump(
        {
            (*IDS, 0): torch.tensor([[0, 0, 7], [4, 5, 6]]),
            ("model", "input.position_ids", 0): torch.tensor([[1, 1, 0], [0, 1, 2]]),
            ("model", "input.attention_mask", 0): torch.tensor([[0, 0, 1], [1, 1, 1]]),
        }
    )
    assert rows_of(find_passes(dump)[0]).positions == ((-1, -1, 0), (0, 1, 2))


def test_without_positions_the_mask_counts_them() -> None:
    dump = make_dump(
        {
            (*IDS, 0): torch.tensor([[0, 0, 7], [4, 5, 6]]),
            ("model", "input.attention_mask", 0): torch.tensor([[0, 0, 1], [1, 1, 1]]),
            (*IDS, 1): torch.tensor([[8], [9]]),
            ("model", "input.attention_mask", 1): torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]),
        }
    )
    prefill, decode = find_passes(dump)
    assert rows_of(prefill).positions == ((-1, -1, 0), (0, 1, 2))
    assert rows_of(decode).positions == ((1,), (3,))


def test_mask_of_an_encoder_is_not_the_padding_of_its_decoder() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    for port in ("input.encoder_attention_mask", "input.attention_mask"):
        dump = make_dump(
            {(*IDS, 0): torch.tensor([[8], [9]]), ("decoder", port, 0): mask},
        )
        assert rows_of(find_passes(dump)[0]).positions == ((0,), (0,))


def test_padding_is_unknown_where_a_pass_holds_two_texts() -> None:
    mask = torch.tensor([[1, 1], [1, 0]])
    dump = make_dump(
        {
            ("model", "input.input_ids", 0): torch.tensor([[5, 6], [7, 0]]),
            ("model", "input.attention_mask", 0): mask,
            ("model", "input.decoder_input_ids", 0): torch.tensor([[1, 2], [3, 4]]),
        }
    )
    (one,) = find_passes(dump)
    assert rows_of(one).positions == ((0, 1), (0, 1))
    assert one.ids is not None
    assert one.ids.tolist() == [[1, 2], [3, 4]]


def test_recorded_calls_of_another_sequence_keep_their_rows() -> None:
    of_encoder, of_model = RowMap((0, 1), ((0, 1), (0, -1))), RowMap((0, 1), ((3,), (3,)))
    dump = make_dump(
        {
            ("encoder", "output", 0): torch.zeros(2, 2, 4),
            ("tower", "output", 0): torch.zeros(2, 2, 4),
            ("", "output", 0): torch.zeros(2, 1, 4),
        },
    )
    rows_of_call = {"encoder": of_encoder, "": of_model}
    tensors = [replace(one, rows=rows_of_call.get(one.site.at.module)) for one in dump.tensors]
    dump = replace(dump, tensors=tensors)
    one = replace(find_passes(dump)[0], rows=RowMap((5, 6), ((3,), (3,))))  # numbered

    assert one.rows_at(CallSite(0, "encoder")) == RowMap((5, 6), of_encoder.positions)
    assert one.rows_at(CallSite(0, "tower")) is None
    assert one.rows_at(CallSite(0, "")) is one.rows


def test_without_ids_the_shape_of_most_activations_counts() -> None:
    dump = make_dump({("a", "output", 0): torch.zeros(2, 5, 8)})
    assert find_passes(dump)[0].shape == (2, 5)


def test_equal_structures_are_paired_in_order() -> None:
    one, other = passes_of([[1, 2]], [[3]]), passes_of([[1, 2]], [[4]])
    aligned = align_passes(one, other)
    assert [(p.expected.step, p.actual.step) for p in aligned.pairs] == [(0, 0), (1, 1)]
    assert not aligned.notes
    assert not aligned.missing
    assert not aligned.extra


def test_a_warm_up_run_is_extra_and_noted() -> None:
    expected = passes_of([[1, 2, 3]], [[4]])
    actual = passes_of([[9]], [[1, 2, 3]], [[4]])
    aligned = align_passes(expected, actual)
    assert [(p.expected.step, p.actual.step) for p in aligned.pairs] == [(0, 1), (1, 2)]
    assert [one.step for one in aligned.extra] == [0]
    assert any("warm-up" in note for note in aligned.notes)


def test_a_missing_step_is_listed() -> None:
    aligned = align_passes(passes_of([[1, 2]], [[3]], [[4]]), passes_of([[1, 2]], [[3]]))
    assert [one.step for one in aligned.missing] == [2]


def test_a_given_shift_is_used() -> None:
    expected, actual = passes_of([[1, 2]], [[3]]), passes_of([[1, 2]], [[1, 2]], [[3]])
    aligned = align_passes(expected, actual, token_shift=1)
    assert [(p.expected.step, p.actual.step) for p in aligned.pairs] == [(0, 1), (1, 2)]


def test_prompts_of_a_second_request_have_their_own_numbers() -> None:
    passes = passes_of([[5, 6], [7, 8]], [[1], [2]], [[9, 9], [3, 3]], [[4], [5]])
    assert [rows_of(one).prompts for one in passes] == [(0, 1), (0, 1), (2, 3), (2, 3)]


def pairs_by_row(
    expected: list[Pass], actual: list[Pass]
) -> list[tuple[int, int, list[int], list[int]]]:
    found = []
    for pair in align_passes(expected, actual).pairs:
        assert pair.expected_rows is not None
        assert pair.actual_rows is not None
        numbers = pair.expected_rows.tolist(), pair.actual_rows.tolist()
        found.append((pair.expected.step, pair.actual.step, *numbers))
    return found


def test_a_chunked_prefill_is_paired_token_by_token() -> None:
    expected, actual = passes_of([[5, 6, 7]], [[8]]), passes_of([[5, 6]], [[7]], [[8]])
    assert pairs_by_row(expected, actual) == [
        (0, 0, [0, 1], [0, 1]), (0, 1, [2], [0]), (1, 2, [0], [0]),
    ]  # fmt: skip


def test_a_reordered_batch_is_paired_by_prompt() -> None:
    expected, actual = passes_of([[5, 6], [7, 8]]), passes_of([[7, 8], [5, 6]])
    assert pairs_by_row(expected, actual) == [(0, 0, [0, 1, 2, 3], [2, 3, 0, 1])]


def test_prompts_one_by_one_are_paired_in_any_order() -> None:
    def passes(*prompts: list[int]) -> list[Pass]:
        return [
            Pass(0, step, RowMap((step,), ((0, 1),)), torch.tensor([ids]))
            for step, ids in enumerate(prompts)
        ]

    found = align_passes(passes([5, 6], [7, 8], [1, 2]), passes([5, 6], [1, 2], [7, 8]))
    assert [(one.expected.step, one.actual.step) for one in found.pairs] == [(0, 0), (1, 2), (2, 1)]

    found = align_passes(passes([5, 6], [7, 8]), passes([7, 8], [5, 9]))
    assert [(one.expected.step, one.actual.step) for one in found.pairs] == [(0, 0), (1, 1)]


def test_prompts_one_by_one_are_paired_with_a_batch() -> None:
    expected = passes_of([[5, 6], [7, 8]], [[2], [1]])
    actual = passes_of([[7, 8]], [[1]], [[5, 6]], [[2]])
    assert pairs_by_row(expected, actual) == [
        (0, 2, [0, 1], [0, 1]), (1, 3, [0], [0]), (0, 0, [2, 3], [0, 1]), (1, 1, [1], [0]),
    ]  # fmt: skip


def test_a_pass_without_tokens_is_paired_with_none() -> None:
    (prefill,) = passes_of([[5, 6]])
    for unknown in (Pass(0, 0, None), replace(prefill, ids=None), replace(prefill, rows=None)):
        (pair,) = match_rows([unknown, prefill], [prefill, unknown])
        assert (pair.expected, pair.actual) == (prefill, prefill)
        assert match_rows([unknown], [unknown]) == []


@pytest.mark.parametrize(
    ("expected", "actual", "is_alike"),
    [
        ([[5, 6], [7, 8]], [[5, 6, 7, 8]], True),
        ([[5, 6], [7, 8]], [[5, 6, 7]], False),
        ([[5, 6, 7]], [[5, 6], [7, 8]], False),
    ],
)
def test_passes_are_alike_if_they_hold_as_many_tokens(
    expected: list[list[int]], actual: list[list[int]], is_alike: bool
) -> None:
    (one,), (other,) = passes_of(expected), passes_of(actual)
    assert PassPair(one, other).is_of_as_many_tokens is is_alike
    unknown = Pass(0, 0, None)
    assert PassPair(one, unknown).is_of_as_many_tokens
    assert PassPair(unknown, other).is_of_as_many_tokens


def test_a_cache_of_a_window_holds_the_last_tokens() -> None:
    one = Pass(0, 0, RowMap((0, 1), ((0, 1, 2, 3), (0, 1, 2, 3))))
    whole_BHTC = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    numbers = torch.tensor(
        [0, 2, 3, 5, 6, 7]
    )  # tokens 0, 2, 3 of the first prompt, 1, 2, 3 of the second

    expected, all_held = take_rows(whole_BHTC, one, numbers) or (None, None)
    found, held = take_rows(whole_BHTC[:, :, -2:], one, numbers) or (None, None)

    assert expected is not None
    assert found is not None
    assert held is not None
    assert all_held is not None
    assert all_held.all()
    assert held.tolist() == [False, True, True, False, True, True]
    assert torch.equal(found[held], expected[held])


def compared(
    expected: list[list[list[int]]], actual: list[list[list[int]]],
    logits: tuple[Tensor, Tensor] | None = None,
) -> TokenComparison:  # fmt: skip
    def passes_of(side: list[list[list[int]]]) -> list[Pass]:
        ids = {("embed", "input.0", step): torch.tensor(one) for step, one in enumerate(side)}
        return find_passes(make_dump(ids))

    def logits_of(prompt: int, position: int) -> tuple[Tensor, Tensor] | None:
        del prompt, position
        return logits

    return compare_ids(align_passes(passes_of(expected), passes_of(actual)), logits_of)


def choosing(expected: int, actual: int) -> tuple[Tensor, Tensor]:
    """Logits (10,) by which each side chooses its token."""
    eye = torch.eye(10)
    return eye[expected], eye[actual]


def test_equal_ids_exclude_nothing() -> None:
    found = compared([[[1, 2]], [[3]]], [[[1, 2]], [[3]]])
    assert (found.num_prompt_tokens, found.num_generated) == (2, 1)
    assert not found.different


def test_another_prompt_is_not_a_generated_token() -> None:
    found = compared([[[1, 2], [5, 6]]], [[[1, 2], [5, 7]]])
    assert [str(one) for one in found.different_prompts] == [
        "prompt 1, position 1: token 7, expected 6"
    ]
    assert found.first_different == {1: 1}


def test_only_the_first_different_token_of_a_prompt_counts() -> None:
    found = compared(
        [[[1, 2], [5, 6]], [[3], [7]], [[4], [8]]], [[[1, 2], [5, 6]], [[3], [9]], [[4], [8]]]
    )
    assert [one.position for one in found.different_generated] == [2]
    assert found.first_different == {1: 2}


@pytest.mark.parametrize(
    ("logits", "is_near_tie"),
    [(choosing(3, 4), True), (choosing(3, 3), False), (None, None)],
)
def test_a_near_tie_needs_the_logits_of_both(
    logits: tuple[Tensor, Tensor] | None, is_near_tie: bool | None
) -> None:
    (different,) = compared([[[1, 2]], [[3]]], [[[1, 2]], [[4]]], logits).different_generated
    assert different.is_near_tie is is_near_tie


TOKEN_IDS, POSITIONS = torch.tensor([[3, 4, 5]]), torch.tensor([[0, 1, 2]])


@pytest.mark.parametrize(
    ("module", "port"),
    [
        ("model.embed_tokens", "input.input_"),  # vLLM 0.32
        ("base_model.embedding", "input.input"),  # ibm-fms 1.13
        ("", "input.x_in"),
        ("", "input.idx"),  # litgpt 0.5
        ("", "input.0"),
    ],
)
@pytest.mark.parametrize("flat", [False, True])
def test_ids_are_the_integer_input_of_an_embedding_or_of_the_model(
    module: str, port: str, flat: bool
) -> None:
    others = {
        ("embed_positions", "input.0", 0): POSITIONS,
        ("rotary_emb", "input.args.0", 0): POSITIONS,
        ("", "input.input_pos", 0): POSITIONS,
        ("", "input.attention_mask", 0): torch.ones_like(TOKEN_IDS),
    }
    ids = TOKEN_IDS[0] if flat else TOKEN_IDS
    (found,) = find_passes(make_dump(others | {(module, port, 0): ids}))
    assert found.ids is not None
    assert found.ids.tolist() == [[3, 4, 5]]


@pytest.mark.parametrize(
    "values",
    [
        {("", "input.0", 0): TOKEN_IDS, ("", "input.1", 0): POSITIONS},
        {("embed.wpe", "input.0", 0): POSITIONS},
        {("embed", "output", 0): TOKEN_IDS},
    ],
)
def test_integers_that_may_be_something_else_are_not_ids(values: Values) -> None:
    assert [one.ids for one in find_passes(make_dump(values))] == [None]
