"""Every rule and pitfall of replay that was met, each with a fault or a clean variant."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody names it
from torch import Tensor, nn

from assay.comparing.judge import find_origin, find_spoilt_padding, rank_stages
from assay.locating.batch_source import BatchSource
from assay.sites import RowMap
from assay.stages import Stage

Rig = Any  # of conftest.py
DOWN = "model.layers.1.mlp.down_proj"


def scale_weights(path: str, factor: float) -> Callable[[Any], None]:
    def plant(model: Any) -> None:
        with torch.no_grad():
            model.get_submodule(path).weight.mul_(factor)

    return plant


def replace_forward(path: str, forward: Callable[..., Any]) -> Callable[[Any], None]:
    """`forward(module, original, *args, **kwargs)` in place of the module's own."""

    def plant(model: Any) -> None:
        module = model.get_submodule(path)
        original = module.forward
        module.forward = lambda *args, **kwargs: forward(module, original, *args, **kwargs)

    return plant


def do_nothing(_model: Any) -> None:
    pass


# Clean runs


def test_same_code_passes(llama_rig: Rig) -> None:
    items = llama_rig.judge()

    assert {item.port.stage.phase for item in items} == {"inputs", "forward"}
    assert [item for item in items if item.failed] == []


def test_rule_12_yardstick_replayed_on_itself_is_exact_to_the_bit(llama_rig: Rig) -> None:
    results = llama_rig.replay_yardstick()

    assert len(results.ports) > 40
    for port in results.ports.values():
        assert (port.sums.dd, port.sums.num_misrounded, port.exact.num_different) == (0, 0, 0)
    assert (results.unmatched_expected, results.covered) == ([], [])


def test_replay_leaves_the_trace_as_it_was(llama_rig: Rig) -> None:
    first = llama_rig.replay(scale_weights(DOWN, 1.02)).ports[DOWN, "output"].sums
    clean = llama_rig.replay().ports[DOWN, "output"].sums
    again = llama_rig.replay(scale_weights(DOWN, 1.02)).ports[DOWN, "output"].sums

    assert (first.dd, first.de) == (again.dd, again.de)
    assert clean.dd < first.dd


def test_sdpa_attention_passes_against_the_eager_reference(llama_rig: Rig) -> None:
    def use_sdpa(model: Any) -> None:
        model.config._attn_implementation = "sdpa"

    assert llama_rig.failed(use_sdpa, attention="sdpa") == set()


# The place of an error


def test_error_stays_in_the_stage_that_makes_it(llama_rig: Rig) -> None:
    assert llama_rig.failed(scale_weights(DOWN, 1.02)) == {DOWN}


def test_error_of_a_parent_s_own_code_is_not_its_children_s(llama_rig: Rig) -> None:
    def forward(module: Any, _original: Any, x: Tensor) -> Any:
        return module.down_proj(module.act_fn(module.gate_proj(x)) * module.up_proj(x) * 1.05)

    plant = replace_forward("model.layers.1.mlp", forward)

    assert llama_rig.failed(plant) == {"model.layers.1.mlp"}


def test_residual_is_judged_in_the_layer_that_adds_it(llama_rig: Rig) -> None:
    def forward(module: Any, _original: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
        attended, _ = module.self_attn(
            hidden_states=module.input_layernorm(hidden_states), **kwargs
        )
        x = hidden_states + attended
        return 1.02 * x + module.mlp(module.post_attention_layernorm(x))

    plant = replace_forward("model.layers.0", forward)

    assert llama_rig.failed(plant) == {"model.layers.0"}


def test_rule_2_mask_made_wrong_in_the_model_is_not_blamed_on_the_attention(
    llama_rig: Rig,
) -> None:
    def forward(
        _module: Any, original: Any, *args: Any, attention_mask: Tensor, **kwargs: Any
    ) -> Any:
        return original(*args, attention_mask=torch.ones_like(attention_mask), **kwargs)

    def plant(model: Any) -> None:
        replace_forward("model", forward)(model)

    origin = find_origin(rank_stages(llama_rig.judge(plant)))

    assert origin is not None
    assert origin.stage == Stage("model")


def test_rule_1_calls_are_pooled_into_one_statistic(llama_rig: Rig) -> None:
    sums = llama_rig.replay().ports[DOWN, "output"].sums

    # 20 + 32 tokens of the prefill and 3 times 2 of decoding: no padding.
    assert sums.num_calls == 4
    assert sums.num_elements == (20 + 32 + 3 * 2) * 32
    assert len({row for part in sums.rows for row in part.position.tolist()}) == 35


def test_rule_3_corrupted_cache_write_is_found_at_the_attention(llama_rig: Rig) -> None:
    def forward(
        _module: Any, original: Any, *args: Any, past_key_values: Any, **kwargs: Any
    ) -> Any:
        output = original(*args, past_key_values=past_key_values, **kwargs)
        layer = past_key_values.layers[1]
        layer.values = layer.values.clone()
        layer.values[:, :, -1] *= 1.5  # the attention of this step is right: the next is not
        return output

    plant = replace_forward("model.layers.1.self_attn", forward)

    assert llama_rig.failed(plant) == {"model.layers.1.self_attn"}


def test_rule_3_overwritten_history_of_a_cache_is_found_at_the_attention(llama_rig: Rig) -> None:
    def forward(
        _module: Any, original: Any, *args: Any, past_key_values: Any, **kwargs: Any
    ) -> Any:
        output = original(*args, past_key_values=past_key_values, **kwargs)
        layer = past_key_values.layers[0]
        if layer.keys.shape[-2] == 34:
            layer.keys = layer.keys.clone()
            layer.keys[1, 0, 0, 0] += 1.0
        return output

    plant = replace_forward("model.layers.0.self_attn", forward)

    assert "model.layers.0.self_attn" in llama_rig.failed(plant)


def test_rule_4_wrong_position_of_the_generation_loop_is_the_inputs_phase(
    make_rig: Any, llama: nn.Module
) -> None:
    shift = [0]

    def loop(model: Any) -> None:
        ids = torch.arange(6)[None]
        model(input_ids=ids, position_ids=torch.arange(6)[None] + shift[0], use_cache=False)

    rig = make_rig(llama, loop)
    rig.judge()
    shift[0] = 1

    assert rig.failed(do_nothing) == {"(model) (inputs)"}


def test_rule_4_only_the_root_call_s_inputs_are_that_phase(llama_rig: Rig) -> None:
    results = llama_rig.replay()

    modules = {p.module for p in results.ports.values() if p.stage.phase == "inputs"}
    assert modules == {""}
    ports = {p.port for p in results.ports.values() if p.stage.phase == "inputs"}
    assert ports == {"input.input_ids", "input.attention_mask", "input.position_ids"}


def test_rule_9_casting_the_whole_model_casts_inv_freq_and_is_found(
    make_rig: Any, llama: nn.Module
) -> None:
    def loop(model: Any) -> None:
        # Far out: 0.1 is 0.1001 in bfloat16, and the angle 0.1 off at position 1000.
        positions = torch.arange(1000, 1016)[None]
        model(input_ids=torch.arange(16)[None], position_ids=positions, use_cache=False)

    def plant(model: Any) -> None:
        model.to(torch.bfloat16)

    rig = make_rig(llama, loop)

    assert rig.failed(do_nothing) == set()
    assert rig.failed(plant) == {"model.rotary_emb"}


# Padding


def spoil_pads(tensor: Tensor) -> Tensor:
    """Garbage where prompt 0 has padding; nothing where the call has none."""
    if tensor.shape[1] != 32:
        return tensor
    spoiled = tensor.clone()
    spoiled[0, :12] = 1e4
    return spoiled


@pytest.mark.parametrize(
    "path", ["model.embed_tokens", "model.layers.0.mlp.up_proj", "model.layers.1.self_attn.k_proj"]
)
def test_rule_7_garbage_in_padding_is_no_error(llama_rig: Rig, path: str) -> None:
    plant = replace_forward(
        path, lambda _module, original, x, **kwargs: spoil_pads(original(x, **kwargs))
    )

    assert llama_rig.failed(plant) == set()


def test_padding_that_is_not_finite_is_kept_in_mind_where_it_is_written(llama_rig: Rig) -> None:
    path = "model.layers.0.mlp.up_proj"

    def spoil(_module: Any, original: Any, x: Tensor) -> Tensor:
        output: Tensor = original(x)
        return spoil_pads(output).masked_fill(spoil_pads(torch.zeros_like(output)) > 0, math.nan)

    assert llama_rig.failed(replace_forward(path, spoil)) == set()
    spoilt = find_spoilt_padding(llama_rig.replay(replace_forward(path, spoil)))
    assert spoilt is not None
    assert spoilt.stage == Stage(path)
    assert find_spoilt_padding(llama_rig.replay()) is None


def test_rule_7_garbage_in_the_padding_of_a_cache_is_no_error(llama_rig: Rig) -> None:
    def forward(
        _module: Any, original: Any, *args: Any, past_key_values: Any, **kwargs: Any
    ) -> Any:
        output = original(*args, past_key_values=past_key_values, **kwargs)
        layer = past_key_values.layers[0]
        if layer.keys.shape[-2] == 32:
            layer.keys = layer.keys.clone()
            layer.keys[0, :, :12] = 1e4
        return output

    plant = replace_forward("model.layers.0.self_attn", forward)

    assert llama_rig.failed(plant) == set()


def test_same_garbage_in_a_token_is_an_error(llama_rig: Rig) -> None:
    def spoil_token(tensor: Tensor) -> Tensor:
        spoiled = tensor.clone()
        spoiled[0, -1] += 1.0
        return spoiled

    path = "model.layers.0.mlp.up_proj"
    plant = replace_forward(path, lambda _module, original, x: spoil_token(original(x)))

    assert llama_rig.failed(plant) == {path}


def test_rule_7_positions_of_padding_are_nobody_s_business(make_rig: Any, llama: nn.Module) -> None:
    at_padding = [0]
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    timeline = _timeline(mask)

    def loop(model: Any) -> None:
        positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, at_padding[0])
        ids = torch.arange(10).reshape(2, 5)
        model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)

    rig = make_rig(llama, loop, timeline=timeline)
    rig.judge()
    at_padding[0] = 1

    assert rig.failed(do_nothing) == set()


def _timeline(mask: Tensor) -> Any:
    from assay.recording.timeline import Timeline

    return Timeline.of_batch(tuple(range(len(mask))), mask, 0)


# Experts


class Router(nn.Module):
    """Chooses two of four experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16, generator=torch.Generator().manual_seed(3)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = F.linear(x.reshape(-1, 16), self.weight)
        weights, chosen = scores.softmax(-1).topk(2)
        return scores, weights, chosen


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()

    def forward(self, x: Tensor) -> Any:
        scores, weights, chosen = self.router(x.to(self.router.weight.dtype))
        return scores.gather(-1, chosen) * weights


@pytest.fixture
def experts_rig(make_rig: Any, tensor: Callable[..., Tensor]) -> Rig:
    tokens = tensor(1, 4096, 16)
    return make_rig(Experts(), lambda model: model(tokens))


def test_rule_6_choices_that_rounding_flips_are_left_out_and_counted(experts_rig: Rig) -> None:
    results = experts_rig.replay()

    chosen = results.ports["router", "output.2"].exact
    # Also rows whose two experts are only in the other order.
    assert 0 < chosen.num_near_ties < 80
    assert (chosen.num_compared, chosen.num_different) == (4096 - chosen.num_near_ties, 0)
    weights = results.ports["router", "output.1"].sums
    assert weights.num_elements == 2 * chosen.num_compared
    assert experts_rig.failed(do_nothing) == set()


def test_rule_6_choice_of_a_clearly_worse_expert_is_an_error(experts_rig: Rig) -> None:
    def forward(_module: Any, original: Any, x: Tensor) -> Any:
        scores, weights, chosen = original(x)
        chosen = chosen.clone()
        chosen[7] = scores[7].argsort()[:2]
        return scores, weights, chosen

    items = experts_rig.judge(replace_forward("router", forward))

    failed = {(item.port.port, item.ratio.statistic) for item in items if item.failed}
    assert failed == {("output.2", "exact")}


def test_rule_6_what_follows_gets_the_reference_s_choice(experts_rig: Rig) -> None:
    def forward(_module: Any, original: Any, x: Tensor) -> Any:
        scores, weights, chosen = original(x)
        return scores, weights, chosen.flip(-1).roll(1, 0)

    assert experts_rig.failed(replace_forward("router", forward)) == {"router"}


# Structures


class Nest(nn.Module):
    """A child with a tuple result, one part of which a variant may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Pair()

    def forward(self, input_ids: Tensor) -> Any:
        return 2 * self.child(input_ids.to(self.child.weight.dtype))[0]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x * self.weight, x + self.weight


NUMBERS = torch.arange(64.0).reshape(1, 8, 8)


@pytest.fixture
def nest_rig(make_rig: Any) -> Rig:
    return make_rig(Nest(), lambda model: model(NUMBERS))


def test_rule_10_parts_of_a_tuple_that_one_side_leaves_out_are_not_compared(nest_rig: Rig) -> None:
    plant = replace_forward("child", lambda _module, original, x: (original(x)[0], None))

    results = nest_rig.replay(plant)

    assert ("child", "output.0") in results.ports
    assert ("child", "output.1") not in results.ports
    assert results.unmatched_expected == []


def test_part_of_a_tuple_that_is_gone_altogether_is_missing(nest_rig: Rig) -> None:
    plant = replace_forward("child", lambda _module, original, x: (original(x)[0],))

    assert nest_rig.replay(plant).unmatched_expected == ["child:output.1"]


def test_rule_10_values_keep_the_dtype_that_the_running_code_gave_them(
    make_rig: Any, tensor: Callable[..., Tensor]
) -> None:
    seen: list[torch.dtype] = []

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()
            self.weight = nn.Parameter(tensor(8, 8))

        def forward(self, x: Tensor) -> Any:
            scores = F.linear(x.to(self.weight.dtype), self.weight).float().softmax(-1)
            seen.append(self.inner(scores).dtype)
            return scores

    rig = make_rig(Router(), lambda model: model(NUMBERS))
    rig.replay()

    assert seen[-1] is torch.float32  # bfloat16 weights, float32 on purpose


def test_value_changed_in_place_between_two_children_is_compared(
    make_rig: Any, tensor: Callable[..., Tensor]
) -> None:
    class InPlace(nn.Module):
        factor = 2.0

        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(8, 8)
            self.two = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            hidden = self.one(x.to(self.one.weight.dtype))
            hidden.mul_(self.factor)
            return self.two(hidden)

    x = tensor(1, 64, 8)
    rig = make_rig(InPlace(), lambda model: model(x))

    def plant(model: Any) -> None:
        model.factor = 2.1

    assert rig.failed(do_nothing) == set()
    assert rig.failed(plant) == {"(model)"}


def test_argument_that_only_the_candidate_changes_is_an_error_of_the_changer(
    make_rig: Any, tensor: Callable[..., Tensor]
) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            hidden = x.to(self.inner.weight.dtype) * 2
            return hidden + self.inner(hidden)

    def spoil(_module: Any, original: Any, hidden: Tensor) -> Any:
        output = original(hidden)
        hidden.add_(1.0)
        return output

    x = tensor(1, 64, 8)
    rig = make_rig(Outer(), lambda model: model(x))

    assert rig.failed(replace_forward("inner", spoil)) == {"inner"}


# What has no partner


def test_child_that_is_never_called_is_covered_by_its_parent(llama_rig: Rig) -> None:
    def forward(module: Any, _original: Any, x: Tensor) -> Any:
        gated = F.silu(F.linear(x, module.gate_proj.weight)) * F.linear(x, module.up_proj.weight)
        return F.linear(gated, module.down_proj.weight)

    results = llama_rig.replay(replace_forward("model.layers.0.mlp", forward))

    assert sorted(results.covered) == [
        f"model.layers.0.mlp.{name}" for name in ("act_fn", "down_proj", "gate_proj", "up_proj")
    ]
    assert results.unmatched_expected == []


def test_error_inside_of_a_covered_child_is_found_at_the_parent(llama_rig: Rig) -> None:
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
    make_rig: Any, tensor: Callable[..., Tensor]
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
    make_rig: Any, tensor: Callable[..., Tensor]
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


def test_result_of_another_shape_is_an_error(nest_rig: Rig) -> None:
    plant = replace_forward("child", lambda _m, original, x: tuple(t[:, :4] for t in original(x)))

    assert "child" in nest_rig.failed(plant)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_value_that_is_not_finite_is_found_where_it_is_made(
    llama_rig: Rig, value: float
) -> None:
    def spoil(_module: Any, original: Any, x: Tensor) -> Tensor:
        output: Tensor = original(x)
        output[1, -1, 3] = value
        return output

    items = [item for item in llama_rig.judge(replace_forward(DOWN, spoil)) if item.failed]

    assert {(item.port.module, item.ratio.statistic) for item in items} == {(DOWN, "non-finite")}


# One row of a batch


ROWS = RowMap((3, 5), ((-1, 0, 1), (0, 1, 2)))


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

    part = source.select(values, ROWS)

    assert tuple(part.shape) == expected == source.selected_shape(shape, ROWS)
    if shape != expected:
        assert torch.equal(part.reshape(-1), values.reshape(-1)[values.numel() // 2 :])
    assert source.select_rows(ROWS) == RowMap((5,), ((0, 1, 2),))


def test_whole_batch_selects_everything() -> None:
    values = torch.zeros(2, 3, 4)

    assert BatchSource(0).select(values, ROWS) is values
    assert BatchSource(0).select_rows(ROWS) is ROWS
