from collections.abc import Iterator

import pytest
import torch
from torch import nn

from assay.estimates.products import Product, ProductCounter
from assay.estimates.trial_call import TrialCall
from assay.models.loading.loaded_model import load_outline

NUM_TOKENS = 5


@pytest.fixture
def meta() -> Iterator[None]:
    with torch.no_grad(), torch.device("meta"):
        yield


@pytest.mark.usefixtures("meta")
def test_layers_are_counted_by_their_shapes() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6, bias=False), nn.Linear(6, 8))
    stored_by_input = torch.empty(8, 4)

    with ProductCounter(NUM_TOKENS) as counter:
        model(torch.empty(1, NUM_TOKENS, 6)) @ stored_by_input

    assert counter.found == [
        Product((6, 8), is_transposed=True, count=2),
        Product((8, 6), is_transposed=True, count=1),
        Product((8, 4), is_transposed=False, count=1),
    ]


@pytest.mark.usefixtures("meta")
@pytest.mark.parametrize("rows_first", [True, False])
def test_chosen_experts_are_counted_and_attention_is_not(*, rows_first: bool) -> None:
    chosen = 2 * NUM_TOKENS
    experts, heads = torch.empty(chosen, 8, 6), torch.empty(3, NUM_TOKENS, 4)

    with ProductCounter(NUM_TOKENS) as counter:
        if rows_first:
            torch.empty(chosen, 1, 6) @ experts.mT
        else:
            experts @ torch.empty(chosen, 6, 1)
        heads @ heads.mT

    assert counter.found == [Product((6, 8), is_transposed=True, is_chosen=True, count=2)]


@pytest.mark.usefixtures("meta")
def test_call_without_products_has_one_to_measure() -> None:
    with ProductCounter(NUM_TOKENS) as counter:
        torch.empty(NUM_TOKENS, 6) + 1

    assert [one.count for one in counter.found] == [1]


def test_token_is_multiplied_by_the_layers_and_the_head_of_a_decoder() -> None:
    outline = load_outline("micro:llama")
    config = outline.config
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    kept = config.num_key_value_heads * config.head_dim
    layer = hidden * (2 * queries + 2 * kept + 3 * inner)

    products = TrialCall.of(outline.model).num_multiplied

    assert products == config.num_hidden_layers * layer + hidden * config.vocab_size
