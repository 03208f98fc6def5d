import torch
from torch import Tensor

from assay.offline.pairing.matching import Matching, is_allowed, match_lanes, match_modules
from assay.offline.pairing.passes import Pass
from assay.offline.pairing.port_series import Graph, Span, collect_lanes
from packages.core.tests.unit.offline.memory_dump import make_dump

Values = dict[tuple[str, str], Tensor]


def matched(expected: Values, actual: Values, names: dict[str, str] | None = None) -> Matching:
    def open_graph(side: Values) -> Graph:
        dump = make_dump({(*key, 0): value for key, value in side.items()})
        return Graph(collect_lanes(dump), dump, Pass(0, 0, None), None)

    graphs = open_graph(expected), open_graph(actual)
    lanes = graphs[0].lanes, graphs[1].lanes
    return match_lanes(*lanes, match_modules(*lanes, names or {}), graphs=graphs)


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
