"""Matching of modules and ports, by name and by guess."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from assay.comparison.check import CompareOptions, compare_dumps
from assay.comparison.pairing.matching import Matching, is_allowed, match_modules, match_series
from assay.comparison.pairing.passes import Pass
from assay.comparison.pairing.port_series import Graph, Span, collect_series
from assay.dumps.protocol import Dump
from assay.runs import SilentProgress
from assay.verdicts import Outcome, Verdict
from packages.core.tests.unit.comparison.memory_dump import make_dump
from packages.core.tests.unit.comparison.small_llama import (
    LAYERS,
    LIBRARIES,
    Ports,
    call,
    dump_of,
    make_weights,
    normed,
    transformers,
)

Values = dict[tuple[str, str], Tensor]


def matched(expected: Values, actual: Values, names: dict[str, str] | None = None) -> Matching:
    def open_graph(side: Values) -> Graph:
        dump = make_dump({(*key, 0): value for key, value in side.items()})
        return Graph(collect_series(dump), Pass(0, 0, None), None)

    graphs = open_graph(expected), open_graph(actual)
    series_of = graphs[0].series_of, graphs[1].series_of
    return match_series(*series_of, match_modules(*series_of, names or {}), graphs=graphs)


def names_of(matching: Matching) -> list[tuple[str, str]]:
    return [(str(pair.expected.port), str(pair.actual.port)) for pair in matching.pairs]


X, Y = torch.zeros(2, 3), torch.zeros(2, 4)


def test_equal_names_match() -> None:
    assert names_of(matched({("a", "output"): X}, {("a", "output"): X})) == [
        ("a:output", "a:output")
    ]


def test_a_head_model_matches_its_base_model() -> None:
    found = matched({("model.layers.0", "output"): X}, {("layers.0", "output"): X})
    assert names_of(found) == [("model.layers.0:output", "layers.0:output")]


def test_an_ambiguous_name_without_prefix_does_not_match() -> None:
    found = matched(
        {("layers.0", "output"): X},
        {("model.layers.0", "output"): X, ("transformer.layers.0", "output"): X},
    )
    assert found.pairs == []


def test_arguments_by_position_and_by_keyword_match_in_order() -> None:
    found = matched(
        {("a", "input.0"): X, ("a", "input.1"): Y, ("a", "output"): X},
        {("a", "input.mask"): Y, ("a", "input.hidden"): X, ("a", "output.0"): X},
    )
    assert names_of(found) == [
        ("a:input.0", "a:input.hidden"), ("a:input.1", "a:input.mask"), ("a:output", "a:output.0"),
    ]  # fmt: skip


def test_integers_of_different_names_are_different_arguments() -> None:
    ids = torch.zeros(2, 3, dtype=torch.long)
    found = matched(
        {("a", "input.input_ids"): ids, ("a", "input.hidden"): X},
        {
            ("a", "input.attention_mask"): ids,
            ("a", "input.states"): X,
            ("", "input.input_ids"): ids,
        },
    )
    assert names_of(found) == [
        ("a:input.input_ids", "(model):input.input_ids"), ("a:input.hidden", "a:input.states"),
    ]  # fmt: skip


def test_an_input_is_never_matched_with_an_output() -> None:
    found = matched({("a", "input.0"): X}, {("a", "output"): X})
    assert found.unmatched_expected == ["a:input.0"]
    assert found.unmatched_actual == ["a:output"]


def test_an_unmatched_name_lists_its_nearest() -> None:
    found = matched({("layers.0.mlp", "output"): X}, {("layers.0.mpl", "output"): X})
    assert found.unmatched_expected == ["layers.0.mlp:output (nearest: layers.0.mpl:output)"]


def linear(width: int) -> Tensor:
    return torch.zeros(2, width)


def test_a_fused_projection_is_paired_with_its_parts() -> None:
    names = ("q", "k", "v")
    parts = {(f"a.{n}", "output"): linear(w) for n, w in zip(names, (4, 2, 2), strict=True)}
    inputs = {("a.q", "input.0"): X, ("a.k", "input.0"): X, ("a.v", "input.0"): X}
    fused = {("a.qkv", "input.0"): X, ("a.qkv", "output"): linear(8)}
    found = matched({**inputs, **parts}, fused)
    assert not found.unmatched_expected
    assert not found.unmatched_actual
    spans = {str(pair.port): pair.actual_span for pair in found.pairs}
    assert spans["a.q:output"] == Span(0, 4)
    assert spans["a.v:output"] == Span(6, 2)
    assert spans["a.k:input.0"] is None


def test_an_expected_fused_projection_is_reported_by_its_parts() -> None:
    parts = {("a.gate", "output"): linear(4), ("a.up", "output"): linear(4)}
    found = matched({("a.gate_up", "output"): linear(8)}, parts)
    assert [(str(pair.port), pair.expected_span) for pair in found.pairs] == [
        ("a.gate:output", Span(0, 4)), ("a.up:output", Span(4, 4)),
    ]  # fmt: skip


def test_logits_with_a_partner_are_not_paired_by_their_width_again() -> None:
    logits = linear(48)
    expected = {("lm_head", "output"): logits, ("", "output.logits"): logits}
    actual = {("lm_head", "output"): logits, ("layers.0.query", "output"): linear(48)}
    assert names_of(matched(expected, actual)) == [("lm_head:output", "lm_head:output")]


def test_a_module_of_another_width_is_not_paired() -> None:
    parts = {("a.gate", "output"): linear(4), ("a.up", "output"): linear(3)}
    assert not matched(parts, {("a.gate_up", "output"): linear(8)}).pairs


def test_a_map_with_wildcards_wins() -> None:
    found = matched(
        {("h.3.ff", "output"): X}, {("blocks.3.mlp", "output"): X}, {"h.*.ff": "blocks.*.mlp"}
    )
    assert names_of(found) == [("h.3.ff:output", "blocks.3.mlp:output")]


def test_a_mask_that_the_other_side_lacks_is_kept_separate() -> None:
    found = matched({("a", "input.0"): X, ("a", "input.attention_mask"): Y}, {("a", "input.0"): X})
    assert [str(one.port) for one in found.absent_masks] == ["a:input.attention_mask"]
    assert found.unmatched_expected == []


def test_globs_allow_a_port_its_module_or_one_around_it() -> None:
    name = "model.layers.0.mlp:input.0 (nearest: x)"
    assert is_allowed(name, ["model.layers.*.mlp"])
    assert is_allowed(name, ["model.layers"])
    assert is_allowed(name, ["*:input.0"])
    assert not is_allowed(name, ["model.layers.1*", "mlp", "nearest*"])


def test_an_argument_of_the_model_is_not_that_of_a_module_with_another_shape() -> None:
    ids = torch.zeros(1, 2, dtype=torch.long)
    found = matched({("a.qkv", "input.input"): X}, {("", "input.input"): ids})
    assert found.pairs == []


def judge(expected: Dump, actual: Dump) -> Verdict:
    return compare_dumps(CompareOptions("a", "b"), expected, actual, SilentProgress()).verdict


def with_fused_projections(seen: Mapping[str, Tensor]) -> Ports:
    """Fuse q, k and v of transformers, as GPT-2, GPT-NeoX and Phi-3 do."""
    ports = transformers(seen)
    for n in range(LAYERS):
        attn = f"model.layers.{n}.self_attn"
        joined = torch.cat([seen[f"{n}.{name}"] for name in "qkv"], -1)
        fused = call(f"{attn}.qkv_proj", "Linear", seen[f"{n}.norm_1"], joined)
        kept = {key: one for key, one in ports.items() if not key.startswith(f"{attn}.q_proj:")}
        before = list(kept).index(f"{attn}.k_proj:input.x")
        items = list(kept.items())
        ports = dict([*items[:before], *fused.items(), *items[before:]])
        ports = {
            key: one
            for key, one in ports.items()
            if not key.startswith((f"{attn}.k_proj:", f"{attn}.v_proj:"))
        }
    return ports


def with_hooks(seen: Mapping[str, Tensor]) -> Ports:
    """Split q, k and v into modules with hooks, as the bridge of transformer-lens 4.3 does.

    A hook in `k` is as wide as a head: `k.hook_in`, `k._original_component` and `k.hook_out` together are as
    wide as q, k and v where all have one width.
    """
    ports: Ports = {}
    for key, one in LIBRARIES["litgpt"](seen).items():
        module = key.partition(":")[0]
        if not module.endswith("attn.qkv"):
            ports[key] = one
            continue
        if key.endswith(":output"):
            continue
        attn, n = module.removesuffix(".qkv"), int(module.split(".")[2])
        given = seen[f"{n}.norm_1"]
        for name in "qkv":
            at, result = f"{attn}.{name}", seen[f"{n}.{name}"]
            ports |= call(f"{at}.hook_in", "HookPoint", given, given)
            ports |= call(f"{at}._original_component", "Linear", given, result)
            ports |= call(f"{at}.hook_out", "HookPoint", result, result)
            ports |= call(at, "LinearBridge", given, result, "input.input")
    return ports


@pytest.mark.parametrize("name", ["0.q", "1.k", "2.v", "1.down", "0.norm_2"])
def test_hooks_between_the_parts_of_a_fused_projection_are_no_parts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As many heads of keys as of queries: any three modules are as wide as q, k and v together.
    monkeypatch.setattr("packages.core.tests.unit.comparison.small_llama.KV_HEADS", 4)
    clean = dump_of(with_fused_projections)
    assert judge(clean, dump_of(with_hooks)).verdict is not Outcome.FAIL
    weights = make_weights()
    weights[name] *= 1.05

    verdict = judge(clean, dump_of(with_hooks, weights))

    assert verdict.location is not None
    layer, what = name.split(".")
    places = {
        "down": f"model.layers.{layer}.mlp.down_proj",
        "norm_2": f"model.layers.{layer}.post_attention_layernorm",
    }
    assert verdict.location.module == places.get(what, f"transformer.h.{layer}.attn.{what}")


def with_scaled_embedding(seen: Mapping[str, Tensor]) -> Ports:
    """Scale the embedding outside of its module, as litgpt 0.5.13 does for Gemma 2."""
    ports = LIBRARIES["litgpt"](seen)
    return ports | {"transformer.wte:output": ("Embedding", seen["embed"] / 8)}


def scaled_inside(seen: Mapping[str, Tensor]) -> Ports:
    """Scale it inside of its module, as transformers 5.23 does."""
    ports = transformers(seen)
    return ports | {"model.embed_tokens:output": ("ScaledWordEmbedding", seen["embed"])}


def test_a_scale_outside_of_a_module_is_no_error() -> None:
    verdict = judge(dump_of(scaled_inside), dump_of(with_scaled_embedding))

    assert verdict.verdict is Outcome.NOT_COMPARED
    assert "model.embed_tokens:output with transformer.wte:output" in str(verdict.levels)


@pytest.mark.parametrize(
    ("name", "module"),
    [("0.norm_1", "input_layernorm"), ("0.q", "self_attn.q_proj"), ("0.down", "mlp.down_proj")],
)
def test_a_scale_outside_of_a_module_hides_no_error_of_the_first_layer(
    name: str, module: str
) -> None:
    weights = make_weights()
    weights[name] *= 1.05

    verdict = judge(dump_of(scaled_inside), dump_of(with_scaled_embedding, weights))

    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert verdict.location.module == f"model.layers.0.{module}"


def test_an_error_that_a_later_norm_undoes_is_named() -> None:
    def undone(seen: Mapping[str, Tensor]) -> Ports:
        """Scale the MLP, which a norm follows, as in Gemma 2 and OLMo 2."""
        ports = LIBRARIES["litgpt"](seen)
        at = "transformer.h.1.mlp"
        wrong = {f"{at}{one}:output": ("Other", 1.05 * seen["1.down"]) for one in (".proj", "")}
        return ports | wrong

    verdict = judge(dump_of(transformers), dump_of(undone))

    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert verdict.location.module == "model.layers.1.mlp.down_proj"


def test_logits_are_compared_where_the_models_agree_on_them() -> None:
    """A model bounds its logits after the head, and an engine computes both in one module: vLLM 0.32, Gemma 2."""

    def bounded(seen: Mapping[str, Tensor]) -> Ports:
        logits = 3 * torch.tanh(seen["logits"] / 3)
        return transformers(seen) | {":output.logits": ("Gemma2ForCausalLM", logits)}

    def in_one_module(seen: Mapping[str, Tensor]) -> Ports:
        ports = LIBRARIES["vllm"](seen)
        logits = 3 * torch.tanh(seen["logits"] / 3)
        return {
            key: (kind, logits if key.endswith("logits_processor:output") else value)
            for key, (kind, value) in ports.items()
        }

    verdict = judge(dump_of(bounded), dump_of(in_one_module))

    assert verdict.verdict is Outcome.NOT_COMPARED
    assert verdict.levels["logits"].verdict is Outcome.PASS
    weights = make_weights()
    weights["head"] *= 1.05
    wrong = judge(dump_of(bounded), dump_of(in_one_module, weights))
    assert wrong.location is not None
    assert wrong.location.module == "lm_head"


def scaled(ports: Ports, factor: float, names: tuple[str, ...]) -> Ports:
    return {
        key: (kind, value * factor if key.endswith(names) else value)
        for key, (kind, value) in ports.items()
    }


def test_equal_names_and_classes_are_no_guess() -> None:
    """A query that is 10 % too large in all layers may change attention by less than the noise of bfloat16."""

    def wrong(seen: Mapping[str, Tensor]) -> Ports:
        return scaled(transformers(seen), 1.1, (".q_proj:output",))

    verdict = judge(dump_of(transformers), dump_of(wrong))

    assert verdict.location is not None
    assert verdict.location.module == "model.layers.0.self_attn.q_proj"


def test_zeros_confirm_no_guess() -> None:
    def scaled_outside(seen: Mapping[str, Tensor]) -> Ports:
        """Scale the result of attention outside of its projection, and skip attention in the last layer."""
        ports = scaled(LIBRARIES["litgpt"](seen), 0.3, (".attn.proj:output",))
        return scaled(ports, 0.0, ("h.2.attn.proj:output",))

    def skipped(seen: Mapping[str, Tensor]) -> Ports:
        return scaled(transformers(seen), 0.0, ("layers.2.self_attn.o_proj:output",))

    assert judge(dump_of(skipped), dump_of(scaled_outside)).verdict is Outcome.NOT_COMPARED


def test_an_error_of_all_layers_that_their_norms_undo_is_an_error() -> None:
    def with_norms(seen: Mapping[str, Tensor], factor: float = 1.0) -> Ports:
        ports = transformers(seen)
        wrong = (".mlp.down_proj:output", ".mlp:output")
        ports = scaled(ports, factor, wrong)
        for n in range(LAYERS):
            given = seen[f"{n}.down"] * factor
            norm = call(f"model.layers.{n}.after", "RMSNorm", given, normed(given, torch.ones(1)))
            before = list(ports).index(f"model.layers.{n}:input.x")
            items = list(ports.items())
            ports = dict([*items[:before], *norm.items(), *items[before:]])
        return ports

    verdict = judge(dump_of(with_norms), dump_of(lambda seen: with_norms(seen, 1.05)))

    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert verdict.location.module == "model.layers.0.mlp.down_proj"
