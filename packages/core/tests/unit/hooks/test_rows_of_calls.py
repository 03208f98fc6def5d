"""Rows of calls whose positions are not given: those of their own tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from assay.hooks.module_tracer import ActiveCall, ModuleTracer, NullHandler
from assay.sites import RowMap


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
