"""Rows of calls whose positions are not given: those of their own tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from assay.hooks.module_tracer import ActiveCall, ModuleTracer, NullHandler
from assay.hooks.row_positions import BatchPositions, RowIndex, RowLayout, holds_rows
from assay.sites import RowMap

# Prompt 4 has two tokens and is padded, prompt 7 has three.
MASK = torch.tensor([[0, 1, 1], [1, 1, 1]])
ROWS = RowMap((4, 7), ((-1, 0, 1), (0, 1, 2)))


def test_positions_start_after_the_padding_and_include_generated_tokens() -> None:
    positions = BatchPositions.of_batch((4, 7), MASK, 2)

    assert positions.positions.tolist() == [[-1, 0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_rows_of_the_prefill_its_chunks_and_decode_steps_are_columns() -> None:
    positions = BatchPositions.of_batch((4, 7), MASK, 2)

    assert positions.rows(0, 3) == ROWS
    assert positions.rows(0, 2) == RowMap((4, 7), ((-1, 0), (0, 1)))
    assert positions.rows(2, 1) == RowMap((4, 7), ((1,), (2,)))
    assert positions.rows(3, 1) == RowMap((4, 7), ((2,), (3,)))


class Cache:
    def get_seq_length(self) -> int:
        return 5


def test_positions_continue_after_the_tokens_of_a_cache() -> None:
    ids = torch.zeros(2, 1)

    assert BatchPositions.of_call(ids, None, None, Cache()).positions.tolist() == [[5], [5]]
    assert BatchPositions.of_call(ids, None, torch.tensor([[7]]), Cache()).positions[
        0
    ].tolist() == [7]


def of_mask(mask: list[list[int]], length: int, past: int | None) -> list[list[int]]:
    class Past:
        def get_seq_length(self) -> int:
            if past is None:
                raise ValueError("only linear layers")
            return past

    tokens, found = torch.zeros(len(mask), length), torch.tensor(mask)
    return BatchPositions.of_call(tokens, found, None, Past()).positions.tolist()


@pytest.mark.parametrize(
    ("mask", "length", "past", "expected"),
    [
        ([[0, 1, 1], [1, 1, 1]], 3, 0, [[-1, 0, 1], [0, 1, 2]]),
        ([[0, 1, 1], [1, 1, 1]], 1, 2, [[1], [2]]),
        ([[0, 1, 1], [1, 1, 1]], 2, 1, [[0, 1], [1, 2]]),
        ([[0, 1, 1, 0, 0], [1, 1, 1, 0, 0]], 1, 2, [[1], [2]]),  # two free slots of a static cache
        ([[1, 1, 1, 1], [1, 1, 0, 0]], 1, 0, [[0], [0]]),  # the mask of an encoder
        ([[1, 1, 1, 1], [1, 1, 0, 0]], 1, 2, [[2], [2]]),
        ([[1, 1], [1, 1]], 1, 4, [[4], [4]]),
        ([[0, 1], [1, 1]], 2, 4, [[-1, 4], [4, 5]]),  # of the tokens of a second chunk
        ([[0, 1, 1], [1, 1, 1]], 1, None, [[1], [2]]),
        ([[1, 1, 1], [1, 0, 0]], 1, None, [[0], [0]]),
    ],
)
def test_a_mask_belongs_to_the_sequence_whose_length_it_has(
    mask: list[list[int]], length: int, past: int | None, expected: list[list[int]]
) -> None:
    assert of_mask(mask, length, past) == expected


def test_last_rows_of_another_sequence_are_not_padding() -> None:
    rows = RowMap((4, 7), ((0, 1, 2), (0, -1, -1)))

    # Patches of images or the last logits: (B, fewer, C).
    assert addresses(2, 2, 8, rows=rows) == [(4, 1), (4, 2), (7, -1), (7, -1)]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((2, 3, 8), True), ((6, 8), True), ((2, 4, 3, 8), True), ((2, 8), True), ((2, 1, 8), True),
     ((2, 3, 16, 16), True), ((2, 4, 16, 16), False), ((2, 4, 2, 8), False), ((9, 8), False)],
)  # fmt: skip
def test_images_hold_no_rows_of_a_call(shape: tuple[int, ...], *, expected: bool) -> None:
    assert holds_rows(torch.Size(shape), ROWS) is expected


def addresses(*shape: int, rows: RowMap | None = ROWS) -> list[tuple[int, int]]:
    """Return prompt and position of each row that is compared."""
    _, prompt, position = RowIndex(rows).flatten(torch.zeros(shape))
    return list(zip(prompt.tolist(), position.tolist(), strict=True))


VALID = [(4, 0), (4, 1), (7, 0), (7, 1), (7, 2)]


def test_pads_are_out_of_hidden_states() -> None:
    assert addresses(2, 3, 8) == VALID


def test_pads_are_out_of_flattened_hidden_states() -> None:
    assert addresses(6, 8) == VALID


def test_each_chosen_expert_of_a_token_has_a_row() -> None:
    # (B * T, k, C), as experts return the states of each token.
    assert addresses(6, 2, 8) == [address for address in VALID for _ in range(2)]


def test_pads_are_out_of_caches_by_head() -> None:
    # (B, heads, T, head_dim): every head has its rows.
    assert addresses(2, 2, 3, 8) == [*VALID[:2], *VALID[:2], *VALID[2:], *VALID[2:]]


def test_pads_are_out_of_queries_before_heads_are_moved() -> None:
    assert addresses(2, 3, 5, 8) == [address for address in VALID for _ in range(5)]


def test_pads_are_out_of_a_tail_such_as_a_window_or_the_last_logits() -> None:
    assert addresses(2, 2, 8) == [(4, 0), (4, 1), (7, 1), (7, 2)]
    assert addresses(2, 1, 8) == [(4, 1), (7, 2)]
    assert addresses(2, 5, 2, 8)[:2] == [(4, 0), (4, 1)]


def test_padding_is_the_rows_that_flatten_leaves_out() -> None:
    values = torch.arange(6.0).reshape(2, 3, 1)

    (padding,) = RowIndex(ROWS).padding(values)

    assert padding.tolist() == [[0.0]]
    assert RowIndex(None).padding(values)[0].shape == (0, 1)


def test_row_shared_by_all_prompts_is_compared_if_one_has_a_token() -> None:
    rows = RowMap((4, 7), ((-1, -1, 0), (-1, 0, 1)))

    assert addresses(1, 3, 8, rows=rows) == [(-1, 0), (-1, 1)]


def test_tensor_without_tokens_is_compared_whole() -> None:
    assert addresses(5, rows=ROWS) == [(-1, -1)]
    assert addresses(rows=ROWS) == [(-1, -1)]
    assert addresses(9, 8, rows=ROWS) == [(-1, -1)] * 9


def test_tensor_with_unknown_rows_keeps_all_of_them() -> None:
    assert addresses(2, 3, 8, rows=None) == [(-1, -1)] * 6


def test_values_follow_their_addresses() -> None:
    values = torch.arange(6.0).reshape(2, 3, 1)

    (first, second), _, _ = RowIndex(ROWS).flatten(values, 10 * values)

    assert first[:, 0].tolist() == [1, 2, 3, 4, 5]
    assert second[:, 0].tolist() == [10, 20, 30, 40, 50]


def test_rows_of_a_decode_step_have_the_position_of_the_step() -> None:
    step = RowMap((4, 7), ((2,), (3,)))

    assert addresses(2, 1, 8, rows=step) == [(4, 2), (7, 3)]
    assert addresses(2, 4, 1, 8, rows=step)[::4] == [(4, 2), (7, 3)]


def test_flattened_rows_of_a_decode_step_have_the_position_of_the_step() -> None:
    # Routers see (B * T, hidden): with T = 1 this looks like (B, hidden).
    step = RowMap((4, 7), ((2,), (3,)))

    assert addresses(2, 8, rows=step) == [(4, 2), (7, 3)]


def test_rows_of_a_prefill_without_tokens_have_the_first_position() -> None:
    assert addresses(2, 8) == [(4, 0), (7, 0)]


def test_empty_tensors_have_no_rows() -> None:
    assert addresses(2, 0, 8) == []
    assert addresses(2, 3, 0) == VALID


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 3, 8), RowLayout(0, 1)),
        ((6, 8), RowLayout(0, None, flattened=True)),
        ((2, 4, 3, 8), RowLayout(0, 2)),
        ((1, 3, 8), RowLayout(None, 1)),
        ((2, 9), RowLayout(0, None)),
        ((2, 1, 8), RowLayout(0, 1, tail=True)),
        ((8,), RowLayout(None, None)),
        ((), RowLayout(None, None)),
    ],
)
def test_layout_is_read_from_the_shape(shape: tuple[int, ...], expected: RowLayout) -> None:
    assert RowLayout.of_shape(shape, ROWS) == expected


def test_addresses_are_cached_by_shape() -> None:
    index = RowIndex(ROWS)

    _, _, first = index.flatten(torch.zeros(2, 3, 8))
    _, _, again = index.flatten(torch.zeros(2, 3, 8))

    assert first is again


class Log(NullHandler):
    def __init__(self) -> None:
        self.entries: list[ActiveCall] = []

    def enter(self, active: ActiveCall) -> None:
        self.entries.append(active)


class Child(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return 2 * x


@pytest.fixture
def log() -> Log:
    return Log()


def test_rows_without_positions_come_from_the_mask_of_the_call(log: Log) -> None:
    class Masked(nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            return input_ids * attention_mask

    model = Masked()
    with ModuleTracer(log).attached(model):
        model(torch.ones(2, 2), torch.tensor([[0, 1], [1, 1]]))

    assert log.entries[0].call.rows == RowMap((0, 1), ((-1, 0), (0, 1)))


class Text(nn.Module):
    """A stack of an encoder or decoder, with one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Child()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
    ) -> Any:  # fmt: skip
        del attention_mask, encoder_hidden_states
        return self.layer(input_ids[..., None].float())


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Child()

    def forward(self, pixels: Tensor) -> Any:
        return self.layer(pixels.flatten(2).mT[:, :4])


class TwoSequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()
        self.encoder = Text()
        self.decoder = Text()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor | None = None
    ) -> Any:
        self.tower(torch.ones(2, 3, 8, 8))
        encoded = self.encoder(input_ids=input_ids, attention_mask=attention_mask)
        ids = input_ids.roll(1) if decoder_input_ids is None else decoder_input_ids
        return self.decoder(input_ids=ids, encoder_hidden_states=encoded)


@pytest.mark.parametrize("length", [None, 4, 1])  # None: the model makes the tokens of the decoder
def test_an_encoder_its_decoder_and_a_tower_have_rows_of_their_own(
    log: Log, length: int | None
) -> None:
    model, ids = TwoSequences(), torch.ones(2, 4, dtype=torch.long)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    arguments = {} if length is None else {"decoder_input_ids": ids[:, :length]}
    with ModuleTracer(log).attached(model):
        model(ids, mask, **arguments)

    rows = {entry.call.site.module: entry.call.rows for entry in log.entries}
    of_encoder = RowMap((0, 1), ((0, 1, 2, 3), (0, 1, -1, -1)))
    of_decoder = RowMap((0, 1), (tuple(range(length or 4)),) * 2)
    assert rows == {
        "": of_encoder if length is None else of_decoder,
        "encoder": of_encoder, "encoder.layer": of_encoder,
        "decoder": of_decoder, "decoder.layer": of_decoder,
        "tower": None, "tower.layer": None,
    }  # fmt: skip


def test_text_of_another_part_does_not_move_the_columns_of_a_generation(log: Log) -> None:
    model, ids, mask = TwoSequences(), torch.ones(2, 4), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    positions = BatchPositions.of_batch((4, 7), mask, 2)
    with (tracer := ModuleTracer(log)).attached(model):
        tracer.begin_batch(0, positions)
        for part in (model.encoder, model.decoder):
            part(input_ids=ids, attention_mask=mask)
        model.decoder(input_ids=ids[:, :1], attention_mask=torch.ones(2, 5))

    prefill, step = positions.rows(0, 4), positions.rows(4, 1)
    rows = [one.call.rows for one in log.entries if one.call.site.module in ("encoder", "decoder")]
    assert rows == [prefill, prefill, step]


def test_call_without_tokens_of_a_batch_has_one_address_for_each_prompt() -> None:
    assert addresses(2, 3, rows=RowMap((4, 7), ((), ()))) == [(4, 0), (7, 0)]


def test_embeddings_of_the_same_tokens_keep_their_padding(log: Log) -> None:
    class Inner(nn.Module):
        def forward(self, inputs_embeds: Tensor, attention_mask: Tensor) -> Any:
            return inputs_embeds * attention_mask[:, 0, -1, :, None]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            of_pairs = attention_mask[:, None, None].expand(-1, 1, 2, -1)
            return self.inner(inputs_embeds=input_ids[..., None], attention_mask=of_pairs)

    with ModuleTracer(log).attached(model := Outer()):
        model(torch.ones(2, 2), torch.tensor([[0, 1], [1, 1]]))

    rows = RowMap((0, 1), ((-1, 0), (0, 1)))
    assert [entry.call.rows for entry in log.entries] == [rows, rows]
