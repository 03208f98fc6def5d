import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    LlamaConfig,
    MistralConfig,
    QuantizedCache,
    StaticCache,
)
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, LinearAttentionLayer

from assay.hooks.caches import (
    Addition,
    CacheTracker,
    cache_of,
    count_tokens,
    find_caches,
    find_unreadable,
    is_cache,
    list_parts,
    passed_on,
)
from assay.hooks.tensors import InPlaceChanges, write_injected


def test_a_cache_has_one_port_whatever_a_version_calls_its_argument() -> None:
    cache = DynamicCache()
    for name in ("past_key_values", "cache", "past_key_value"):
        assert find_caches({"hidden_states": None, name: cache}) == [("past_key_values", cache)]
        assert cache_of({"hidden_states": None, name: cache}) is cache
    assert find_caches({"layer_past": cache}) == [("layer_past", cache)]
    assert cache_of({"past_key_values": None}) is None


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


def additions(tracer: CacheTracker, before: Any) -> dict[str, Addition]:
    found = tracer.additions(before)
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

    found = additions(tracer, before)

    assert sorted(found) == ["changed.past_key_values.0.keys", "changed.past_key_values.0.values"]
    assert torch.equal(found["changed.past_key_values.0.keys"].tensor, states(3, 1.0))
    assert torch.equal(found["changed.past_key_values.0.values"].tensor, states(3, 2.0))
    assert not any(addition.history_changed for addition in found.values())


def test_next_call_adds_only_its_own_tokens(cache: DynamicCache) -> None:
    tracer = CacheTracker()
    cache.update(states(3, 1.0), states(3, 1.0), 1)
    before = tracer.snapshot({"past_key_values": cache})
    cache.update(states(1, 5.0), states(1, 6.0), 1)

    found = additions(tracer, before)

    assert torch.equal(found["changed.past_key_values.1.keys"].tensor, states(1, 5.0))


def test_writing_to_an_addition_writes_to_the_cache(cache: DynamicCache) -> None:
    tracer = CacheTracker()
    cache.update(states(1, 1.0), states(1, 1.0), 0)
    before = tracer.snapshot({"past_key_values": cache})
    cache.update(states(2, 1.0), states(2, 1.0), 0)

    additions(tracer, before)["changed.past_key_values.0.keys"].tensor.fill_(9.0)

    assert keys_of(cache)[0, 0, :, 0].tolist() == [1.0, 9.0, 9.0]


def test_addition_of_an_inner_call_is_not_reported_again_by_its_callers(
    cache: DynamicCache,
) -> None:
    tracer = CacheTracker()
    outer = inner = tracer.snapshot({"past_key_values": cache})
    cache.update(states(3, 1.0), states(3, 1.0), 0)

    assert len(additions(tracer, inner)) == 2
    assert additions(tracer, outer) == {}
    tracer.begin_root()
    assert len(additions(tracer, outer)) == 2


def test_call_that_only_reads_the_cache_adds_nothing(cache: DynamicCache) -> None:
    tracer = CacheTracker()
    cache.update(states(3, 1.0), states(3, 1.0), 0)

    assert additions(tracer, tracer.snapshot({"past_key_values": cache})) == {}


def test_overwritten_earlier_tokens_are_noticed(cache: DynamicCache) -> None:
    tracer = CacheTracker()
    cache.update(states(3, 1.0), states(3, 1.0), 0)
    before = tracer.snapshot({"past_key_values": cache})
    cache.update(states(1, 2.0), states(1, 2.0), 0)
    corrupted = keys_of(cache).clone()
    corrupted[0, 0, 0, 0] = 7.0
    layer: Any = cache.layers[0]
    layer.keys = corrupted

    found = additions(tracer, before)

    keys, values = (found[f"changed.past_key_values.0.{name}"] for name in ("keys", "values"))
    assert keys.history_changed
    assert keys.history is not None
    now, before_call = keys.history
    assert torch.equal(now, corrupted[..., :3, :])
    assert torch.equal(before_call, states(3, 1.0))
    assert not values.history_changed


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_tokens_overwritten_between_two_calls_are_noticed(cache: DynamicCache, kind: str) -> None:
    if kind == "static":
        config = LlamaConfig(
            hidden_size=HEADS * DIM, num_attention_heads=HEADS, num_hidden_layers=2, vocab_size=8
        )
        cache = StaticCache(config=config, max_cache_len=8)  # type: ignore[assignment]
    tracer = CacheTracker()
    found = []
    for is_corrupted in (False, False, True, False):
        if is_corrupted:
            keys_of(cache)[:, :, 1] = 7.0
        tracer.begin_root()
        before = tracer.snapshot({"past_key_values": cache})
        cache.update(states(2, 1.0), states(2, 2.0), 0)
        for addition in tracer.additions(before):
            if addition.port.endswith("keys"):
                found.append(bool(addition.history_changed))
            addition.tensor.fill_(3.0)  # as a replay injects the reference's

    assert found == [False, False, True, False]


def test_tokens_overwritten_within_a_call_before_its_own_are_noticed(cache: DynamicCache) -> None:
    tracer = CacheTracker()
    found: dict[str, Addition] = {}
    for is_corrupted in (False, True):
        tracer.begin_root()
        before = tracer.snapshot({"past_key_values": cache})
        if is_corrupted:
            keys_of(cache)[:, :, 0] = keys_of(cache)[:, :, 1]
        cache.update(states(2, 1.0), states(2, 2.0), 0)
        found = additions(tracer, before)

    keys, values = (found[f"changed.past_key_values.0.{name}"] for name in ("keys", "values"))
    assert keys.history_changed
    assert not values.history_changed


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

    assert additions(tracer, before)["changed.past_key_values.0.keys"].tensor.shape == (
        1, HEADS, 2, DIM,
    )  # fmt: skip
    tracer.begin_root()
    before = tracer.snapshot({"past_key_values": cache})
    cache.update(states(1, 3.0), states(1, 3.0), 0)
    found = additions(tracer, before)["changed.past_key_values.0.keys"]
    assert torch.equal(found.tensor, states(1, 3.0))
    assert not found.history_changed


def test_other_arguments_have_no_additions() -> None:
    tracer = CacheTracker()
    arguments = {"x": torch.ones(2), "past_key_values": None, "layers": [1]}

    assert tracer.snapshot(arguments) == []
    assert list(tracer.additions([])) == []


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
    parts = list_parts(cache)
    assert [part.name for part in parts] == ["keys", "values", "keys", "values"]
    for part in parts:
        assert part.length == 3
        expected = float(part.name == "keys")
        assert part.tensor[0, 0, :3].tolist() == [[expected] * 8] * 3


def test_reading_an_empty_cache_finds_no_parts() -> None:
    for cache in (DynamicCache(), EncoderDecoderCache(DynamicCache(), DynamicCache())):
        assert count_tokens(cache) == 0
        assert list_parts(cache) == []
        assert find_unreadable(cache) == []


def test_call_that_overwrites_tokens_without_adding_any_changed_the_history(
    cache: DynamicCache,
) -> None:
    tracer = CacheTracker()
    cache.update(states(3, 1.0), states(3, 1.0), 0)
    before = tracer.snapshot({"past_key_values": cache})
    keys_of(cache)[0, 0, 1] = 7.0

    found = additions(tracer, before)

    assert list(found) == ["changed.past_key_values.0.keys"]
    assert found["changed.past_key_values.0.keys"].history_changed


@pytest.mark.parametrize("name", ["inside", "outside"])
def test_tokens_in_a_buffer_are_the_columns_that_a_call_wrote(name: str) -> None:
    cache = StaticCache(LlamaConfig(num_hidden_layers=1), max_cache_len=8)
    tracer = CacheTracker()
    cache.update(states(3, 1.0), states(3, 1.0), 0)
    with torch.inference_mode(name == "inside"):
        before = tracer.snapshot({"past_key_values": cache})
        cache.update(states(2, 5.0), states(2, 6.0), 0)
        found = additions(tracer, before)

    assert torch.equal(found["changed.past_key_values.0.keys"].tensor, states(2, 5.0))
    assert torch.equal(found["changed.past_key_values.0.values"].tensor, states(2, 6.0))
    assert found["changed.past_key_values.0.keys"].history_changed is None


def test_full_window_of_a_buffer_ends_with_the_new_token() -> None:
    config = MistralConfig(num_hidden_layers=1, sliding_window=4)
    cache = StaticCache(config, max_cache_len=16)
    tracer = CacheTracker()
    cache.update(states(6, 1.0), states(6, 1.0), 0)
    before = tracer.snapshot({"past_key_values": cache})
    cache.update(states(1, 5.0), states(1, 5.0), 0)

    found = additions(tracer, before)

    assert torch.equal(found["changed.past_key_values.0.keys"].tensor, states(1, 5.0))


def test_states_of_a_layer_are_whole_additions_each_time_they_change() -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            cache = Cache(layers=[LinearAttentionLayer(), LinearAttentionLayer()])
            tracer = CacheTracker()
            for value in (1.0, 2.0):
                tracer.begin_root()
                before = tracer.snapshot({"cache_params": cache})
                cache.update_conv_state(torch.full((2, 6, 4), value), 1)
                cache.update_recurrent_state(torch.full((2, 6, 5), value), 1)
                found = additions(tracer, before)

                assert {port: one.tensor.shape for port, one in found.items()} == {
                    "changed.cache_params.1.conv_states.0": (2, 6, 4),
                    "changed.cache_params.1.recurrent_states.0": (2, 6, 5),
                }
                assert not any(one.has_tokens for one in found.values())
                state = found["changed.cache_params.1.recurrent_states.0"].tensor
                assert bool((state == value).all())
                state.fill_(9.0)
                layer: Any = cache.layers[1]
                assert bool((layer.recurrent_states[0] == 9.0).all())
            assert count_tokens(cache) is None


def test_each_part_of_a_layer_belongs_to_the_call_that_changed_it() -> None:
    layer = DynamicIndexedLayer()
    cache = Cache(layers=[layer])
    tracer = CacheTracker()
    outer = inner = tracer.snapshot({"past_key_values": cache})
    layer.update_indexer(torch.ones(1, 3, DIM))
    assert list(additions(tracer, inner)) == ["changed.past_key_values.0.indexer_keys"]

    layer.update(states(3, 1.0), states(3, 2.0))

    assert list(additions(tracer, outer)) == [
        "changed.past_key_values.0.keys",
        "changed.past_key_values.0.values",
    ]


def test_cache_of_cross_attention_holds_tokens_of_another_sequence() -> None:
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    tracer = CacheTracker()
    before = tracer.snapshot({"past_key_values": cache})
    cache.self_attention_cache.update(states(1, 1.0), states(1, 1.0), 0)
    cache.cross_attention_cache.update(states(5, 2.0), states(5, 2.0), 0)

    found = additions(tracer, before)

    assert {port: (one.tensor.shape[-2], one.has_tokens) for port, one in found.items()} == {
        "changed.past_key_values.self_attention_cache.0.keys": (1, True),
        "changed.past_key_values.self_attention_cache.0.values": (1, True),
        "changed.past_key_values.cross_attention_cache.0.keys": (5, False),
        "changed.past_key_values.cross_attention_cache.0.values": (5, False),
    }


def test_cache_in_a_tuple_or_a_dictionary_is_found(cache: DynamicCache) -> None:
    tracer = CacheTracker()
    before = tracer.snapshot({"x": torch.ones(1), "state": (None, {"own": cache})})
    cache.update(states(1, 1.0), states(1, 1.0), 0)

    assert sorted(additions(tracer, before)) == [
        "changed.state.1.own.0.keys",
        "changed.state.1.own.0.values",
    ]


def test_tuples_of_keys_and_values_are_plain_arguments() -> None:
    legacy = ((states(1, 1.0), states(1, 1.0)),)

    assert find_caches({"past_key_values": legacy}) == []
    assert count_tokens(legacy) is None


class OwnCache:
    """A cache of a model's own code."""

    def get_seq_length(self, of: str) -> int:
        """The length, which needs an argument."""
        return len(of)


class OwnLayer(DynamicLayer):
    """A layer with another tensor."""

    scales: Tensor


def test_cache_of_an_unknown_class_is_refused_by_name() -> None:
    tracer = CacheTracker()

    before = tracer.snapshot({"past_key_values": OwnCache()})

    assert list(tracer.additions(before)) == []
    assert tracer.find_unreadable() == ["past_key_values, as assay cannot read OwnCache"]
    assert count_tokens(OwnCache()) is None


def test_layer_with_a_tensor_of_an_unknown_name_is_refused_by_name() -> None:
    layer: Any = OwnLayer()  # type: ignore[no-untyped-call]
    cache = Cache(layers=[layer])
    cache.update(states(1, 1.0), states(1, 1.0), 0)
    assert find_unreadable(cache) == []
    layer.scales = torch.ones(1)

    assert find_unreadable(cache) == ["OwnLayer (scales)"]


class MeanKeyLayer:
    """A layer of a model's own code, with a running mean of its keys."""

    assay_tokens = ("rotated_keys",)
    assay_states = ("mean",)

    def __init__(self) -> None:
        self.rotated_keys = torch.ones(1, HEADS, 0, DIM)
        self.mean = torch.zeros(1, HEADS, DIM)

    def update(self, keys: Tensor) -> None:
        """Append the keys, and replace their mean."""
        self.rotated_keys = torch.cat([self.rotated_keys, keys], dim=-2)
        self.mean = self.rotated_keys.mean(dim=-2)


class MeanKeyCache:
    """A cache of a model's own code."""

    assay_states = ()

    def __init__(self) -> None:
        self.layers = [MeanKeyLayer(), MeanKeyLayer()]

    def get_seq_length(self) -> int:
        """The number of tokens of the first layer."""
        return self.layers[0].rotated_keys.shape[-2]


def test_declared_parts_of_another_library_are_read() -> None:
    cache, tracer = MeanKeyCache(), CacheTracker()
    cache.layers[1].update(states(3, 2.0))
    before = tracer.snapshot({"past_key_values": cache})
    cache.layers[1].update(states(1, 6.0))

    found = additions(tracer, before)

    assert list(found) == [
        "changed.past_key_values.1.rotated_keys",
        "changed.past_key_values.1.mean",
    ]
    assert torch.equal(found["changed.past_key_values.1.rotated_keys"].tensor, states(1, 6.0))
    assert found["changed.past_key_values.1.mean"].tensor[0, 0].tolist() == [3.0] * DIM
    assert found["changed.past_key_values.1.rotated_keys"].history_changed is False
    assert count_tokens(cache) == 0
    assert [part.length for part in list_parts(cache)] == [None, 4, None]
    assert find_unreadable(cache) == []


@pytest.mark.parametrize("column", range(8))
def test_a_declared_buffer_that_is_written_in_inference_mode_is_found(column: int) -> None:
    with torch.inference_mode():
        cache, tracer = MeanKeyCache(), CacheTracker()
        cache.layers[0].rotated_keys = torch.zeros(1, HEADS, 64, DIM)
        before = tracer.snapshot({"past_key_values": cache})
        cache.layers[0].rotated_keys[:, :, column, 1] = 1.0

        assert list(additions(tracer, before)) == ["changed.past_key_values.0.rotated_keys"]


def test_a_tensor_that_a_class_does_not_declare_is_named() -> None:
    cache: Any = MeanKeyCache()
    cache.layers[0].scale = torch.ones(1)
    cache.table = {"sin": torch.ones(1)}

    assert find_unreadable(cache) == ["MeanKeyCache (table)", "MeanKeyLayer (scale)"]


def test_quantized_cache_is_refused_by_name() -> None:
    cache = QuantizedCache("fp8", LlamaConfig(num_hidden_layers=1))
    cache.update(states(2, 1.0), states(2, 1.0), 0)

    assert find_unreadable(cache) == ["Fp8QuantizedLayer (_quantized_keys, _quantized_values)"]


def test_buffer_divided_into_views_is_refused_by_name() -> None:
    module = importlib.import_module("transformers.models.unlimited_ocr.modeling_unlimited_ocr")
    layer = module.UnlimitedOcrStaticReferenceSlidingWindowLayer(max_cache_len=16, sliding_window=4)
    layer.update(states(2, 1.0), states(2, 1.0))

    name = type(layer).__name__
    assert find_unreadable(Cache(layers=[layer])) == [f"{name} (all_keys, all_values)"]


def test_output_of_a_model_passes_its_cache_on_under_its_name(cache: DynamicCache) -> None:
    assert passed_on(SimpleNamespace(logits=1, past_key_values=cache)) == {"past_key_values": cache}
    assert passed_on(SimpleNamespace(logits=1, cache_params=cache, state=None)) == {
        "cache_params": cache
    }
    assert passed_on(torch.ones(1)) == {}


# What becomes of each class of cache or layer of transformers. Add a new class here once its parts are known to
# `assay.hooks.caches`, or once it is known to be refused.
READ = """
    Cache DynamicCache StaticCache EncoderDecoderCache MtpCache DFlashCache MiniMaxCache xLSTMCache
    DynamicLayer DynamicSlidingWindowLayer DynamicIndexedLayer StaticLayer StaticSlidingWindowLayer
    StaticIndexedLayer LinearAttentionLayer LinearAttentionAndFullAttentionLayer DummyLayer
    LinearAttentionAndSlidingWindowAttentionLayer LinearAttentionAndStaticFullAttentionLayer
    LinearAttentionAndStaticSlidingWindowAttentionLayer MiniMaxM3VLSparseCacheLayer
    MiniMaxM3VLSparseStaticCacheLayer DeepseekV4HCACache DeepseekV4CSACache
    UnlimitedOcrDynamicReferenceSlidingWindowLayer
"""
# Refused for a tensor that they hold, or for their class: buffers divided into views, quantized values, hashed
# buckets, paddings of convolutions of a stream, features of a video, pages of a server.
REFUSED = """
    UnlimitedOcrStaticReferenceSlidingWindowLayer QuantizedCache BaseQuantizedLayer QuantizedLayer
    QuantoQuantizedLayer HQQQuantizedLayer Fp8QuantizedLayer ReformerDynamicCache
    EdgeTamVideoInferenceCache KyutaiSpeechToTextConv1dPaddingCache MimiConv1dPaddingCache
    MuseSparkAudioConv1dCacheLayer MuseSparkAudioConv1dPaddingCache Nemotron3DiarizationSpeakerCache
    Nemotron3_5AsrRNNTDecoderCache NemotronAsrStreamingConv1dCacheLayer
    NemotronAsrStreamingConv1dPaddingCache NemotronAsrStreamingEncoderCausalConv1dCacheLayer
    NemotronAsrStreamingEncoderCausalConv2dCacheLayer
    NemotronAsrStreamingEncoderCausalConvPaddingCache NemotronAsrStreamingRNNTDecoderCache
    ParakeetRNNTDecoderCache ParakeetTDTDecoderCache PocketTTSAudioTokenizerConv1dPaddingCache
    Sam2VideoInferenceCache Sam3TrackerVideoInferenceCache Sam3VideoInferenceCache
    VibeVoiceAcousticTokenizerConv1dCacheLayer VibeVoiceAcousticTokenizerConv1dPaddingCache
    VibeVoiceAsrConv1dCacheLayer VibeVoiceAsrConv1dPaddingCache VoxtralRealtimeConv1dCacheLayer
    VoxtralRealtimeConv1dPaddingCache OmDetTurboLRUCache
"""
# Bases without values, and what only has such a name: tables of a vocabulary, modules for export.
OTHERS = """
    CacheLayerMixin LinearAttentionCacheLayerMixin AssistantVocabTranslatorCache
"""


def cache_classes() -> set[str]:
    """Names of classes of caches and layers in the source of transformers, without importing its models."""
    folder = Path(transformers.__file__).parent
    files = [
        folder / "cache_utils.py",
        *folder.glob("models/*/*.py"),
        *folder.glob("generation/*.py"),
    ]
    bases: dict[str, set[str]] = {}
    for file in files:
        if file.name.startswith("modular_"):
            continue  # the source of a modeling file
        text = file.read_text(encoding="utf-8")
        if "Cache" in text:
            for name, inherited in re.findall(r"^class (\w+)(?:\(([^)]*)\))?:", text, re.MULTILINE):
                bases.setdefault(name, set()).update(re.findall(r"\w+", inherited))
    found = {name for name in bases if re.search(r"Cache(Layer)?(Mixin)?$", name)} | {"DummyLayer"}
    while more := {name for name, inherited in bases.items() if inherited & found} - found:
        found |= more
    return found


def test_every_class_of_transformers_is_known_to_be_read_or_refused() -> None:
    found, known = cache_classes(), set(f"{READ} {REFUSED} {OTHERS}".split())
    assert sorted(found ^ known) == []
    assert not set(READ.split()) & set(REFUSED.split())


@pytest.mark.parametrize("name", READ.split())
def test_class_that_is_read_derives_from_a_known_one(name: str) -> None:
    modules = (transformers.cache_utils, *map(importlib.import_module, MODEL_MODULES))
    kind = next(getattr(module, name) for module in modules if hasattr(module, name))

    assert find_unreadable(kind.__new__(kind)) == []


MODEL_MODULES = tuple(
    f"transformers.models.{name}.modeling_{name}"
    for name in ("minimax", "xlstm", "minimax_m3_vl", "deepseek_v4", "unlimited_ocr")
)


@pytest.mark.parametrize("value", [None, torch.ones(2), [torch.ones(2)], "cache"])
def test_other_arguments_are_no_caches(value: object) -> None:
    assert not is_cache(value)
    assert list_parts(value) == []
