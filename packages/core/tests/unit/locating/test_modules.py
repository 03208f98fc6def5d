"""Where replay finds an error, and that there is none in a clean run: every rule that was met."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from assay.comparing.judge import find_origin, rank_stages
from assay.stages import Stage
from packages.core.tests.unit.locating.conftest import MakeRig, Rig
from packages.core.tests.unit.locating.plants import do_nothing, replace_forward, scale_weights

DOWN = "model.layers.1.mlp.down_proj"


# Clean runs


def test_same_code_passes(llama_rig: Rig) -> None:
    items = llama_rig.judge()

    assert {item.port.stage.phase for item in items} == {"inputs", "forward"}
    assert [item for item in items if item.failed] == []


def test_yardstick_replayed_on_itself_is_exact_to_the_bit(llama_rig: Rig) -> None:
    results = llama_rig.replay_yardstick()

    assert len(results.ports) > 40
    for port in results.ports.values():
        assert (port.sums.dd, port.sums.num_misrounded, port.exact.num_different) == (0, 0, 0)
    assert (results.unmatched_expected, results.uncalled_modules) == ([], [])


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


def test_output_that_is_declared_absent_is_not_expected(llama_rig: Rig) -> None:
    def without_logits(_module: Any, original: Any, *arguments: Any, **named: Any) -> Any:
        output = original(*arguments, **named)
        return type(output)(past_key_values=output.past_key_values)

    fused = replace_forward("", without_logits)
    declared = frozenset({("", "output.logits")})

    assert llama_rig.replay(fused).unmatched_expected == ["(model):output.logits"]
    assert llama_rig.replay(fused, unmeasured=declared).unmatched_expected == []


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


def test_mask_made_wrong_in_the_model_is_not_attributed_to_the_attention(
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


@pytest.mark.parametrize("reads_strides", [True, False])
def test_kernel_that_ignores_strides_is_found_where_its_input_is_a_view(
    llama_rig: Rig,
    reads_strides: bool,
) -> None:
    def kernel(module: Any, x: Tensor) -> Tensor:
        if not reads_strides:
            contiguous = torch.empty_like(x, memory_format=torch.contiguous_format).stride()
            x = x.as_strided(x.shape, contiguous)
        return nn.functional.linear(x, module.weight)

    def forward(module: Any, _original: Any, x: Tensor) -> Any:
        gated = module.act_fn(module.gate_proj(x)) * module.up_proj(x)
        return module.down_proj(gated.transpose(0, 1).contiguous().transpose(0, 1))

    def plant(model: Any) -> None:
        replace_forward("model.layers.1.mlp", forward)(model)
        down = model.get_submodule(DOWN)
        down.forward = lambda x: kernel(down, x)

    assert llama_rig.failed(plant) == (set() if reads_strides else {DOWN})


def test_calls_are_pooled_into_one_statistic(llama_rig: Rig) -> None:
    sums = llama_rig.replay().ports[DOWN, "output"].sums

    # 20 + 32 tokens of the prefill and 3 times 2 of decoding: no padding.
    assert sums.num_calls == 4
    assert sums.num_elements == (20 + 32 + 3 * 2) * 32
    assert len({row for part in sums.rows for row in part.position.tolist()}) == 35


def test_corrupted_cache_write_is_found_at_the_attention(llama_rig: Rig) -> None:
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


def test_overwritten_history_of_a_cache_is_found_at_the_attention(llama_rig: Rig) -> None:
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


def test_wrong_position_of_the_generation_loop_is_the_inputs_phase(
    make_rig: MakeRig, llama: nn.Module
) -> None:
    shift = [0]

    def loop(model: Any) -> None:
        ids = torch.arange(6)[None]
        model(input_ids=ids, position_ids=torch.arange(6)[None] + shift[0], use_cache=False)

    rig = make_rig(llama, loop)
    rig.judge()
    shift[0] = 1

    assert rig.failed(do_nothing) == {"(model) (inputs)"}


def test_only_the_root_call_s_inputs_are_that_phase(llama_rig: Rig) -> None:
    results = llama_rig.replay()

    modules = {p.module for p in results.ports.values() if p.stage.phase == "inputs"}
    assert modules == {""}
    ports = {p.port for p in results.ports.values() if p.stage.phase == "inputs"}
    assert ports == {"input.input_ids", "input.attention_mask", "input.position_ids"}


def test_casting_the_whole_model_casts_inv_freq_and_is_found(
    make_rig: MakeRig, llama: nn.Module
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


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_value_that_is_not_finite_is_found_where_it_is_made(
    llama_rig: Rig, value: float
) -> None:
    def spoil(_module: Any, original: Any, x: Tensor) -> Tensor:
        output: Tensor = original(x)
        output[1, -1, 3] = value
        return output

    items = [item for item in llama_rig.judge(replace_forward(DOWN, spoil)) if item.failed]

    assert {(item.port.module, item.statistic) for item in items} == {(DOWN, "non-finite")}
