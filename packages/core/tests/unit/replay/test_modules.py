"""Where replay finds an error, and that there is none in a clean run."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody names it
from torch import Tensor, nn
from transformers import DynamicCache, FalconH1Config, FalconH1ForCausalLM, StaticCache

from assay.hooks.row_positions import BatchPositions, RowIndex
from assay.judge.replays import find_nonfinite_padding, find_origin, rank_stages
from assay.judge.results import PortResult
from assay.models.transformers_calls import quiet_transformers
from assay.replay.modules import DriftMeter, add_error
from assay.sites import RowMap
from assay.stages import Stage
from packages.core.tests.unit.replay.conftest import MASK, PREFILL, MakeRig, Rig, generate
from packages.core.tests.unit.replay.plants import do_nothing, replace_forward, scale_weights

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


def without_masks(_module: Any, original: Any, *arguments: Any, **named: Any) -> Any:
    return original(*arguments, **(named | {"attention_mask": None}))


def test_mask_that_a_layer_loses_fails_where_it_is_lost(llama_rig: Rig) -> None:
    ports = llama_rig.replay(replace_forward("model.layers.1", without_masks)).ports
    lost = ports["model.layers.1.self_attn", "input.attention_mask"]

    assert lost.stage == Stage("model.layers.1")
    # Of the padded prompts, every query would see the padding before it.
    assert 0 < lost.exact.num_different < lost.exact.num_compared


def test_mask_that_an_unknown_attention_loses_is_noted_unless_it_implies_the_same(
    llama: nn.Module, llama_rig: Rig, make_rig: MakeRig
) -> None:
    plant = replace_forward("model.layers.1", without_masks)
    results = llama_rig.replay(plant, attention="own")
    module = "model.layers.1.self_attn"
    assert results.absent_masks == {"attention_mask": {module}}
    assert (module, "input.attention_mask") not in results.ports

    rig = make_rig(llama, lambda model: model(torch.arange(6)[None], use_cache=False))
    ports = {port for call in rig.trace.calls if call.site.module == module for port in call.ports}
    assert "input.attention_mask" in ports
    assert rig.replay(plant, attention="own").absent_masks == {}


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


def test_cache_with_a_buffer_is_held_to_the_same_tokens(llama_rig: Rig) -> None:
    def use_buffer(model: Any) -> None:
        model.new_cache = lambda: StaticCache(config=model.config, max_cache_len=40)

    results = llama_rig.replay(use_buffer)

    keys = results.ports["model.layers.1.self_attn", "changed.past_key_values.1.keys"]
    assert keys.sums.num_elements == (20 + 32 + 2 * 3) * 2 * 8
    assert "model.layers.1.self_attn:changed.past_key_values.1.keys" not in (
        results.unmatched_expected
    )
    assert not [
        item for item in llama_rig.judge(use_buffer) if item.failed and "changed" in item.port.port
    ]


def test_cache_of_an_unknown_class_is_not_seen_and_named(llama_rig: Rig) -> None:
    class OwnCache:
        """The cache of a model's own code, without layers."""

        def __init__(self, config: Any) -> None:
            self._kept = DynamicCache(config=config)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._kept, name)

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return self._kept.get_seq_length(layer_idx)

    def use_own(model: Any) -> None:
        model.new_cache = lambda: OwnCache(model.config)

    results = llama_rig.replay(use_own)

    first = results.unmatched_expected[0]
    assert first == "(model):changed.past_key_values, as assay cannot read OwnCache"


@pytest.fixture(scope="module")
def hybrid_rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    """A model whose layers have keys, values, and the states of a convolution and of a recurrence."""
    config = FalconH1Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, mamba_d_ssm=64, mamba_n_heads=8,
        mamba_d_head=8, mamba_d_state=16, mamba_n_groups=2, mamba_chunk_size=16,
        initializer_range=0.2, pad_token_id=0,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    with quiet_transformers():
        model = FalconH1ForCausalLM(config).eval()
    timeline = BatchPositions.of_batch((0, 1), MASK[:, :PREFILL], 3)
    return Rig(tmp_path_factory.mktemp("hybrid") / "yardstick", model, generate, timeline=timeline)


MIXER = "model.layers.1.mamba"


def change_state(part: str, change: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    """Change a state of the second layer after each call."""

    def forward(_module: Any, original: Any, *args: Any, cache_params: Any, **kwargs: Any) -> Any:
        output = original(*args, cache_params=cache_params, **kwargs)
        state = getattr(cache_params.layers[1], part)[0]
        state.copy_(change(state))
        return output

    return replace_forward(MIXER, forward)


def test_states_are_measured_whole_at_the_call_that_replaces_them(hybrid_rig: Rig) -> None:
    results = hybrid_rig.replay()

    state = results.ports[MIXER, "changed.cache_params.1.recurrent_states.0"]
    assert state.sums.num_elements == 4 * 2 * 8 * 8 * 16  # calls, rows, heads, head, state
    assert 0 < state.sums.relative_error < 0.01
    assert results.unmatched_expected == []
    assert not any("changed" in name for name in results.unmatched_actual)
    assert [item for item in hybrid_rig.judge() if item.failed] == []


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("recurrent_states", lambda state: state.to(torch.float8_e4m3fn).to(state.dtype)),
        ("recurrent_states", lambda state: state * 1.02),
        ("conv_states", lambda state: state * 1.02),
        ("conv_states", lambda state: state.flip(0)),
    ],
)
def test_wrong_state_is_found_at_the_module_that_writes_it(
    hybrid_rig: Rig, part: str, change: Callable[[Tensor], Tensor]
) -> None:
    assert hybrid_rig.failed(change_state(part, change)) == {MIXER}


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


NUMBERS = torch.arange(1024).reshape(1, 32, 32)


class Angles(nn.Module):
    """Unit complex numbers, computed in float32 whatever the dtype of the model."""

    def forward(self, positions: Tensor) -> Tensor:
        angle = positions.float() / 7
        return torch.polar(torch.ones_like(angle), angle)


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.angles = Angles()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 32))

    def forward(self, input_ids: Tensor) -> Any:
        turned = self.angles(input_ids) * self.weight.float()
        return turned.real.to(self.weight.dtype)


def test_complex_values_are_held_to_the_rounding_of_float32(make_rig: MakeRig) -> None:
    rig = make_rig(Rotated(), lambda model: model(NUMBERS))

    clean = rig.replay(do_nothing).ports["angles", "output"]

    assert clean.exact.num_compared == 0
    assert clean.dtype == "float32"
    assert 0 < clean.sums.relative_error < 2**-18  # of angles up to 146
    assert rig.failed(do_nothing) == set()


def test_wrong_phase_of_a_complex_table_fails_where_it_is_made(make_rig: MakeRig) -> None:
    rig = make_rig(Rotated(), lambda model: model(NUMBERS))
    plant = replace_forward("angles", lambda _module, original, x: original(x) * 1.0001j / 1j)

    assert rig.failed(plant) == {"angles"}


def test_complex_values_in_place_of_real_ones_differ(make_rig: MakeRig) -> None:
    rig = make_rig(Rotated(), lambda model: model(NUMBERS))
    plant = replace_forward("angles", lambda _module, original, x: original(x).real)

    assert rig.replay(plant).ports["angles", "output"].exact.num_different > 0


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
def experts_rig(make_rig: MakeRig, tensor: Callable[..., Tensor]) -> Rig:
    tokens = tensor(1, 4096, 16)
    return make_rig(Experts(), lambda model: model(tokens))


def test_choices_that_rounding_flips_are_left_out_and_counted(experts_rig: Rig) -> None:
    results = experts_rig.replay()

    chosen = results.ports["router", "output.2"].exact
    # Also rows whose two experts are only in the other order.
    assert 0 < chosen.num_near_ties < 80
    assert (chosen.num_compared, chosen.num_different) == (4096 - chosen.num_near_ties, 0)
    weights = results.ports["router", "output.1"].sums
    assert weights.num_elements == 2 * chosen.num_compared
    assert experts_rig.failed(do_nothing) == set()


def test_choice_of_a_clearly_worse_expert_is_an_error(experts_rig: Rig) -> None:
    def forward(_module: Any, original: Any, x: Tensor) -> Any:
        scores, weights, chosen = original(x)
        chosen = chosen.clone()
        chosen[7] = scores[7].argsort()[:2]
        return scores, weights, chosen

    items = experts_rig.judge(replace_forward("router", forward))

    failed = {(item.port.port, item.statistic) for item in items if item.failed}
    assert failed == {("output.2", "exact")}


def test_what_follows_gets_the_reference_s_choice(experts_rig: Rig) -> None:
    def forward(_module: Any, original: Any, x: Tensor) -> Any:
        scores, weights, chosen = original(x)
        return scores, weights, chosen.flip(-1).roll(1, 0)

    assert experts_rig.failed(replace_forward("router", forward)) == {"router"}


def test_experts_named_in_another_order_with_their_weights_are_the_same_choice(
    experts_rig: Rig,
) -> None:
    def forward(_module: Any, original: Any, x: Tensor) -> Any:
        scores, weights, chosen = original(x)
        return scores, weights.flip(-1), chosen.flip(-1)

    assert experts_rig.failed(replace_forward("router", forward)) == set()


def test_experts_named_in_another_order_without_their_weights_are_an_error(
    experts_rig: Rig,
) -> None:
    def forward(_module: Any, original: Any, x: Tensor) -> Any:
        scores, weights, chosen = original(x)
        return scores, weights, chosen.flip(-1)

    assert experts_rig.failed(replace_forward("router", forward)) == {"router"}


def test_near_ties_of_one_number_for_each_token_are_left_out() -> None:
    result = PortResult("router", "output.1", Stage("router", "forward"), 0, "float32", "")
    rows = RowMap((0, 1, 2), ((5,), (6,), (7,)))
    chosen = torch.tensor([[1], [2], [3]])

    add_error(result, RowIndex(rows), rows, torch.tensor([True, False, False]), chosen + 1, chosen)

    assert result.exact.num_near_ties == 1
    assert (result.exact.num_compared, result.exact.num_different) == (2, 2)
    assert result.exact.first == (1, 6)


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
def test_garbage_in_padding_is_no_error(llama_rig: Rig, path: str) -> None:
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
    nonfinite_padding = find_nonfinite_padding(llama_rig.replay(replace_forward(path, spoil)))
    assert nonfinite_padding is not None
    assert nonfinite_padding.stage == Stage(path)
    assert find_nonfinite_padding(llama_rig.replay()) is None


def test_garbage_in_the_padding_of_a_cache_is_no_error(llama_rig: Rig) -> None:
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


def test_positions_of_padding_are_nobody_s_business(make_rig: MakeRig, llama: nn.Module) -> None:
    at_padding = [0]
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    timeline = BatchPositions.of_batch(tuple(range(len(mask))), mask, 0)

    def loop(model: Any) -> None:
        positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, at_padding[0])
        ids = torch.arange(10).reshape(2, 5)
        model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)

    rig = make_rig(llama, loop, timeline=timeline)
    rig.judge()
    at_padding[0] = 1

    assert rig.failed(do_nothing) == set()


def drift(actual: list[float], expected: list[float]) -> float:
    no_trace: Any = None
    meter = DriftMeter(no_trace)
    meter._add("layer", torch.tensor([actual]), torch.tensor([expected]))
    return meter.relative_errors()["layer"]


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([4.0, 3.0], [4.0, 0.0], 0.75),
        ([1.0, math.inf], [1.0, math.inf], 0.0),
        ([2.0, 0.0], [0.0, 0.0], 1.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
    ],
)
def test_drift_is_relative_to_the_expected_norm(
    actual: list[float], expected: list[float], error: float
) -> None:
    assert drift(actual, expected) == error


@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("rest", [0.0, 1.0])
def test_a_value_that_is_finite_on_one_side_only_has_no_drift(odd: float, rest: float) -> None:
    assert math.isnan(drift([rest, odd], [rest, 2.0]))
    assert math.isnan(drift([rest, 2.0], [rest, odd]))
