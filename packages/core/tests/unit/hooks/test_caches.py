from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    LlamaConfig,
    MistralConfig,
    StaticCache,
)
from transformers.cache_utils import LinearAttentionLayer

from assay.hooks.caches import Addition, CacheTracker, count_tokens, is_cache, list_layers
from assay.hooks.tensors import InPlaceChanges, write_injected


def test_argument_changed_in_place_is_found_under_its_port() -> None:
    x, mask, extra = torch.ones(2), torch.zeros(2), torch.ones(1)
    tracer = InPlaceChanges({"x": x, "masks": {"full": mask, "window": extra}, "scale": 2.0})
    x.add(1)
    mask.fill_(-1)

    changed = list(tracer.changed())

    assert [port for port, _ in changed] == ["masks.full"]
    assert changed[0][1] is mask


def test_change_through_a_view_is_a_change_of_the_argument() -> None:
    x = torch.ones(4)
    tracer = InPlaceChanges({"x": x})
    x[:2].zero_()

    assert [port for port, _ in tracer.changed()] == ["x"]


def test_changes_of_inference_tensors_are_found() -> None:
    with torch.inference_mode():
        x, y = torch.ones(2), torch.ones(2)
        tracer = InPlaceChanges({"x": x, "y": y})
        x.add_(1)

        assert [port for port, _ in tracer.changed()] == ["x"]


def test_values_are_injected_into_inference_tensors() -> None:
    with torch.inference_mode():
        target = torch.zeros(2)
    write_injected(target, torch.ones(2))

    assert target.tolist() == [1.0, 1.0]


HEADS, DIM = 2, 4


def states(tokens: int, value: float) -> Tensor:
    return torch.full((1, HEADS, tokens, DIM), value)


def keys_of(cache: DynamicCache) -> Tensor:
    layer: Any = cache.layers[0]
    keys: Tensor = layer.keys
    return keys


def additions(tracer: CacheTracker, before: Any, num_tokens: int | None) -> dict[str, Addition]:
    found = tracer.additions(before, num_tokens)
    return {addition.port: addition for addition in found}


@pytest.fixture
def cache() -> DynamicCache:
    config = LlamaConfig(
        hidden_size=HEADS * DIM, num_attention_heads=HEADS, num_hidden_layers=2, vocab_size=8
    )
    return DynamicCache(config=config)


def test_first_call_adds_everything(cache: DynamicCache) -> None:
    tracer = CacheTracker()
    before = tracer.snapshot({"past_key_values": cache})
    cache.update(states(3, 1.0), states(3, 2.0), 0)

    found = additions(tracer, before, 3)

    assert sorted(found) == ["changed.past_key_values.0.keys", "changed.past_key_values.0.values"]
    assert torch.equal(found["changed.past_key_values.0.keys"].tensor, states(3, 1.0))
    assert torch.equal(found["changed.past_key_values.0.values"].tensor, states(3, 2.0))
    assert not any(addition.history_changed for addition in found.values())


def test_next_call_adds_only_its_own_tokens(cache: DynamicCache) -> None:
    tracer = CacheTracker()
    cache.update(states(3, 1.0), states(3, 1.0), 1)
    before = tracer.snapshot({"past_key_values": cache})
    cache.update(states(1, 5.0), states(1, 6.0), 1)

    found = additions(tracer, before, 1)

    assert torch.equal(found["changed.past_key_values.1.keys"].tensor, states(1, 5.0))


def test_writing_to_an_addition_writes_to_the_cache(cache: DynamicCache) -> None:
    tracer = CacheTracker()
    before = tracer.snapshot({"past_key_values": cache})
    cache.update(states(3, 1.0), states(3, 1.0), 0)

    additions(tracer, before, 2)["changed.past_key_values.0.keys"].tensor.fill_(9.0)

    assert keys_of(cache)[0, 0, :, 0].tolist() == [1.0, 9.0, 9.0]


def test_addition_of_an_inner_call_is_not_reported_again_by_its_callers(
    cache: DynamicCache,
) -> None:
    tracer = CacheTracker()
    outer = inner = tracer.snapshot({"past_key_values": cache})
    cache.update(states(3, 1.0), states(3, 1.0), 0)

    assert len(additions(tracer, inner, 3)) == 2
    assert additions(tracer, outer, 3) == {}
    tracer.begin_root()
    assert len(additions(tracer, outer, 3)) == 2


def test_call_that_only_reads_the_cache_adds_nothing(cache: DynamicCache) -> None:
    tracer = CacheTracker()
    cache.update(states(3, 1.0), states(3, 1.0), 0)

    assert additions(tracer, tracer.snapshot({"past_key_values": cache}), 3) == {}


def test_overwritten_earlier_tokens_are_noticed(cache: DynamicCache) -> None:
    tracer = CacheTracker()
    cache.update(states(3, 1.0), states(3, 1.0), 0)
    before = tracer.snapshot({"past_key_values": cache})
    cache.update(states(1, 2.0), states(1, 2.0), 0)
    corrupted = keys_of(cache).clone()
    corrupted[0, 0, 0, 0] = 7.0
    layer: Any = cache.layers[0]
    layer.keys = corrupted

    found = additions(tracer, before, 1)

    assert found["changed.past_key_values.0.keys"].history_changed
    assert not found["changed.past_key_values.0.values"].history_changed


def test_sliding_window_reports_the_tokens_that_it_keeps() -> None:
    config = MistralConfig(
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        num_hidden_layers=1,
        vocab_size=8,
        sliding_window=3,
    )
    cache = DynamicCache(config=config)
    tracer = CacheTracker()
    before = tracer.snapshot({"past_key_values": cache})
    cache.update(states(5, 1.0), states(5, 1.0), 0)
    assert keys_of(cache).shape[-2] == 2  # a window of 3 needs the 2 tokens before the next one

    assert additions(tracer, before, 5)["changed.past_key_values.0.keys"].tensor.shape == (
        1, HEADS, 2, DIM,
    )  # fmt: skip
    tracer.begin_root()
    before = tracer.snapshot({"past_key_values": cache})
    cache.update(states(1, 3.0), states(1, 3.0), 0)
    found = additions(tracer, before, 1)["changed.past_key_values.0.keys"]
    assert torch.equal(found.tensor, states(1, 3.0))
    assert not found.history_changed


def test_addition_follows_from_lengths_without_a_number_of_tokens(
    cache: DynamicCache,
) -> None:
    tracer = CacheTracker()
    cache.update(states(3, 1.0), states(3, 1.0), 0)
    before = tracer.snapshot({"past_key_values": cache})
    cache.update(states(2, 2.0), states(2, 2.0), 0)

    found = additions(tracer, before, None)

    assert torch.equal(found["changed.past_key_values.0.keys"].tensor, states(2, 2.0))


def test_other_arguments_have_no_additions() -> None:
    tracer = CacheTracker()
    arguments = {"x": torch.ones(2), "past_key_values": None, "layers": [1]}

    assert tracer.snapshot(arguments) == []
    assert list(tracer.additions([], 1)) == []


CACHES: dict[str, Callable[[], Any]] = {
    "dynamic": lambda: DynamicCache(config=LlamaConfig(num_hidden_layers=2)),
    "sliding": lambda: DynamicCache(config=MistralConfig(num_hidden_layers=2, sliding_window=8)),
    "without a configuration": DynamicCache,
    "static": lambda: StaticCache(LlamaConfig(num_hidden_layers=2), max_cache_len=8),
}


@pytest.mark.parametrize("kind", CACHES)
def test_tokens_and_layers_of_each_kind_of_cache_are_known(kind: str) -> None:
    cache = CACHES[kind]()
    assert is_cache(cache)
    assert count_tokens(cache) == 0
    for layer in range(2):
        cache.update(torch.ones(1, 4, 3, 8), torch.zeros(1, 4, 3, 8), layer)

    assert count_tokens(cache) == 3
    for keys, values in list_layers(cache):
        assert keys is not None
        assert values is not None
        assert keys[0, 0, :3].tolist() == [[1.0] * 8] * 3
        assert not values.any()


def test_cache_of_linear_layers_has_no_length_and_no_parts() -> None:
    cache = Cache(layers=[LinearAttentionLayer(), LinearAttentionLayer()])

    assert is_cache(cache)
    assert count_tokens(cache) is None
    assert list_layers(cache) == [(None, None), (None, None)]


def test_cache_of_an_encoder_and_its_decoder_has_no_layers_of_its_own() -> None:
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())

    assert count_tokens(cache) == 0
    assert list_layers(cache) == []


@pytest.mark.parametrize("value", [None, torch.ones(2), [torch.ones(2)], "cache"])
def test_other_arguments_are_no_caches(value: object) -> None:
    assert not is_cache(value)
    assert list_layers(value) == []
