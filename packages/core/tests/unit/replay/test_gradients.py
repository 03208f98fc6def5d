"""Backward, replayed: an error made there stays in the stage that makes it."""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from assay.hooks.gradient_taps import GradientTaps
from assay.hooks.module_tracer import ModuleTracer
from assay.hooks.suspension import ExactDouble
from assay.hooks.tensors import Boundary
from assay.judge.limits import load_limits
from assay.judge.replays import Judged, judge_replay
from assay.judge.results import ReplayResults
from assay.recording.modules import Recorder
from assay.replay.gradients import GradientReplayer, LossScale
from assay.trace import Trace, TraceWriter
from packages.core.tests.unit.replay.plants import do_nothing

Plant = Callable[[Any], object]

IDS = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(1))
# Prompt 1 has 12 tokens and 8 of padding.
MASK = torch.ones(2, 20, dtype=torch.long)
MASK[1, 12:] = 0
LABELS = IDS.masked_fill(MASK == 0, -100)
UNIT = 2.0**-8  # unit roundoff of bfloat16
NORM = "model.layers.0.post_attention_layernorm"
KEYS = "model.layers.1.self_attn.k_proj"
DOWN = "model.layers.0.mlp.down_proj"


class _Scaled(torch.autograd.Function):
    """The identity, with a gradient that is scaled."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: Tensor) -> Tensor:
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


def scale_gradient(value: Tensor, factor: float | Tensor) -> Tensor:
    scaled: Tensor = _Scaled.apply(value, torch.as_tensor(factor))  # type: ignore[no-untyped-call]
    return scaled


class Rig:
    """Records forward and backward of a model, and replays them with changed copies."""

    def __init__(
        self, model: nn.Module, folder: Path, dtype: torch.dtype, use_cache: object = False
    ) -> None:
        self.model, self.dtype, self.use_cache = model, dtype, use_cache
        self.boundary = Boundary.exact_inputs_for(dtype)
        yardstick = self.copy().double()
        with TraceWriter(folder, {}) as writer:
            self.run(yardstick, GradientTaps(Recorder(writer, self.boundary)), exact=True)
        self.trace = Trace.open(folder)
        self.noise = self.replay(do_nothing)

    def copy(self) -> nn.Module:
        model = copy.deepcopy(self.model).train()
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self.dtype)
        return model

    def run(
        self, model: Any, taps: GradientTaps, *, exact: bool = False, loss_scale: float = 1.0
    ) -> None:
        tracer = ModuleTracer(taps)
        tracer.begin_batch(0, None)
        with tracer.attached(model), ExactDouble() if exact else nullcontext():
            logits = self.logits(model)
            if not exact:
                logits = logits.float()
            loss = nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten(), reduction="mean"
            )
            (taps.join(loss) * loss_scale).backward()
            taps.finish_backward()

    def logits(self, model: Any) -> Tensor:
        logits: Tensor = model(input_ids=IDS, attention_mask=MASK, use_cache=self.use_cache).logits
        return logits

    def replay(self, plant: Plant) -> tuple[ReplayResults, ReplayResults]:
        """Measurements of forward and of backward."""
        model = self.copy()
        plant(model)
        replayer = GradientReplayer(self.trace, self.boundary)
        self.run(model, GradientTaps(replayer))
        self.last = model
        replayer.gradients.flush()
        return replayer.finish(), replayer.gradients

    def recomputed(self, plant: Plant) -> ReplayResults:
        """Measurements of what backward computes again."""
        model = self.copy()
        plant(model)
        replayer = GradientReplayer(self.trace, self.boundary)
        self.run(model, GradientTaps(replayer))
        replayer.recomputed.flush()
        return replayer.recomputed

    def judge(self, plant: Plant) -> list[Judged]:
        pairs = zip(self.replay(plant), self.noise, strict=True)
        return [
            item
            for actual, noise in pairs
            for item in judge_replay(actual, noise, load_limits())[0]
        ]

    def failed(self, plant: Plant) -> set[tuple[str, str]]:
        stages = [item.port.stage for item in self.judge(plant) if item.failed]
        return {(stage.module, stage.phase) for stage in stages}


@pytest.fixture(scope="module")
def rigs(llama: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rig]:
    folder = tmp_path_factory.mktemp("gradients")
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return {name: Rig(llama, folder / name, dtype) for name, dtype in dtypes.items()}


@pytest.fixture(params=["float32", "bfloat16"])
def rig(request: pytest.FixtureRequest, rigs: dict[str, Rig]) -> Rig:
    return rigs[request.param]


def wrap_forward(path: str, change: Callable[[Any, Tensor, Callable[..., Any]], Any]) -> Plant:
    def plant(model: Any) -> None:
        module = model.get_submodule(path)
        original = module.forward
        module.forward = lambda value, *args, **kwargs: change(module, value, original)

    return plant


def test_same_code_passes_with_gradients_at_every_boundary(rig: Rig) -> None:
    items = rig.judge(do_nothing)

    backward = {item.port.stage.module for item in items if item.port.stage.phase == "backward"}
    assert {"", "model", "model.norm", "lm_head", NORM, KEYS, DOWN} <= backward
    assert [item for item in items if item.failed] == []


def test_gradients_are_those_of_plain_backward(rigs: dict[str, Rig]) -> None:
    assert_gradients_are_plain(rigs["float32"])


def assert_gradients_are_plain(rig: Rig) -> None:
    plain = rig.copy()
    logits = rig.logits(plain)
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten()).backward()
    rig.replay(do_nothing)

    for (name, parameter), other in zip(
        plain.named_parameters(), rig.last.parameters(), strict=True
    ):
        assert parameter.grad is not None
        assert other.grad is not None
        assert torch.allclose(other.grad, parameter.grad, rtol=1e-4, atol=1e-6), name


def test_scaled_gradient_of_an_input_is_found_in_its_module_alone(rig: Rig) -> None:
    plant = wrap_forward(DOWN, lambda _, x, original: original(scale_gradient(x, 1.05)))

    assert rig.failed(plant) == {(DOWN, "backward")}


def test_dropped_gradient_of_one_head_is_found_in_the_projection(rig: Rig) -> None:
    def detach_head(_module: Any, x: Tensor, original: Callable[..., Tensor]) -> Tensor:
        keys = original(x)
        return torch.cat([keys[..., :8].detach(), keys[..., 8:]], dim=-1)

    assert rig.failed(wrap_forward(KEYS, detach_head)) == {(KEYS, "backward")}


def test_wrong_backward_of_a_norm_is_found_there(rig: Rig) -> None:
    def forget_root(module: Any, x: Tensor, _original: Any) -> Tensor:
        wide = x.float()
        root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
        return module.weight * (wide * root.detach()).to(x.dtype)  # type: ignore[no-any-return]

    assert rig.failed(wrap_forward(NORM, forget_root)) == {(NORM, "backward")}


def test_detached_input_counts_as_zero_gradient_and_the_rest_goes_on(rig: Rig) -> None:
    plant = wrap_forward(DOWN, lambda _, x, original: original(x.detach()))

    assert rig.failed(plant) == {(DOWN, "backward")}


def test_detached_output_is_the_callers_fault(rig: Rig) -> None:
    def forward(module: Any, x: Tensor, _original: Any) -> Any:
        gated = module.act_fn(module.gate_proj(x)) * module.up_proj(x)
        return module.down_proj(gated).detach()

    # What the caller gets from here has no graph, but it is in backward that this is wrong.
    assert rig.failed(wrap_forward("model.layers.0.mlp", forward)) == {
        ("model.layers.0.mlp", "backward")
    }


def test_residual_that_carries_no_gradient_is_found_in_its_layer(rig: Rig) -> None:
    def plant(model: Any) -> None:
        layer = model.model.layers[1]

        def forward(hidden_states: Tensor, **kwargs: Any) -> Tensor:
            attended, _ = layer.self_attn(
                hidden_states=layer.input_layernorm(hidden_states), **kwargs
            )
            x = hidden_states.detach() + attended
            return x + layer.mlp(layer.post_attention_layernorm(x))  # type: ignore[no-any-return]

        layer.forward = forward

    assert rig.failed(plant) == {("model.layers.1", "backward")}


def test_scaled_loss_is_found_at_the_logits(rig: Rig) -> None:
    def plant(model: Any) -> None:
        model.register_forward_hook(
            lambda _m, _a, out: out.__class__(logits=scale_gradient(out.logits, 1.1))
        )

    assert rig.failed(plant) == {("", "backward")}


@pytest.mark.parametrize(("factor", "goes_on"), [(1.0, False), (1024.0, True)])
def test_only_a_scaled_gradient_that_overflows_reaches_the_parameters_below(
    rig: Rig, *, factor: float, goes_on: bool
) -> None:
    model: Any = rig.copy()
    wrap_forward(DOWN, lambda _, x, original: original(scale_gradient(x, math.inf)))(model)
    loss_scale = LossScale(UNIT)
    replayer = GradientReplayer(rig.trace, rig.boundary, loss_scale=loss_scale)

    rig.run(model, GradientTaps(replayer), loss_scale=factor)

    assert loss_scale.factor == factor
    below = model.model.embed_tokens.weight.grad
    assert bool(below.isfinite().all()) is not goes_on


def test_forward_error_stays_forward_but_for_its_own_gradient(rig: Rig) -> None:
    def plant(model: Any) -> None:
        with torch.no_grad():
            model.get_submodule(DOWN).weight.mul_(1.05)

    assert rig.failed(plant) == {(DOWN, "forward"), (DOWN, "backward")}


def compute_again(path: str, *, reentrant: bool) -> Plant:
    """Activations inside of a module are dropped after forward and computed again in backward."""

    def plant(model: Any) -> None:
        module = model.get_submodule(path)
        inside = type(module).__call__

        class Again(type(module)):  # type: ignore[misc]
            def __call__(self, hidden_states: Tensor, **kwargs: Any) -> Any:
                return checkpoint(
                    lambda value: inside(self, value, **kwargs),
                    hidden_states,
                    use_reentrant=reentrant,
                )

        module.__class__ = Again

    return plant


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-tensor hooks", "reentrant"])
def test_activations_computed_again_are_not_measured_twice(rig: Rig, *, reentrant: bool) -> None:
    plain = rig.replay(do_nothing)
    is_recompute = rig.replay(compute_again("model.layers.1", reentrant=reentrant))

    for results, expected in zip(is_recompute, plain, strict=True):
        assert results.ports.keys() == expected.ports.keys()
        assert results.unmatched_expected == []
        for key, port in results.ports.items():
            assert port.sums.num_calls == expected.ports[key].sums.num_calls
            assert port.sums.dd == pytest.approx(expected.ports[key].sums.dd, rel=1e-6)


class _Experts(nn.Module):
    """One of four experts for each token, the first two of which are nearly tied."""

    def __init__(self) -> None:
        super().__init__()
        self.router = _Router()

    def forward(self, hidden_states: Tensor) -> Tensor:
        scores, chosen = self.router(hidden_states.reshape(-1, 32))
        gained = scores.gather(-1, chosen).sum(-1, keepdim=True)
        added: Tensor = gained.reshape(*hidden_states.shape[:2], 1)
        return hidden_states + added


class _Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weights = torch.randn(4, 32, generator=torch.Generator().manual_seed(3))
        weights[1] = weights[0]
        weights[1, 0] *= 1 + 2.0**-7
        self.weight = nn.Parameter(weights)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = nn.functional.linear(x, self.weight)
        return scores, scores.topk(1).indices


@pytest.fixture(scope="module")
def experts_rig(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    model = copy.deepcopy(llama)
    model.model.layers[1].mlp = _Experts()
    return Rig(model, tmp_path_factory.mktemp("experts") / "yardstick", torch.bfloat16)


def chosen_again(rig: Rig, choose: Callable[[Tensor, Tensor], Tensor]) -> set[tuple[str, str]]:
    """What fails where the router's choice becomes `choose(scores, chosen)` in recomputation."""
    calls = []

    def forward(module: Any, x: Tensor, original: Callable[..., Any]) -> Any:
        calls.append(module)
        scores, chosen = original(x)
        return scores, chosen if len(calls) == 1 else choose(scores, chosen)

    def plant(model: Any) -> None:
        compute_again("model.layers.1", reentrant=False)(model)
        wrap_forward("model.layers.1.mlp.router", forward)(model)

    failed: set[tuple[str, str]] = {
        (item.port.module, item.port.stage.phase)
        for item in judge_replay(rig.recomputed(plant), rig.noise[0], load_limits())[0]
        if item.failed
    }
    assert len(calls) == 2
    return failed


def test_near_tie_that_only_recomputation_decides_otherwise_is_an_error(experts_rig: Rig) -> None:
    def choose_second(scores: Tensor, chosen: Tensor) -> Tensor:
        with torch.no_grad():
            top = scores.float().topk(2)
        is_tie = (top.values[:, :1] - top.values[:, 1:]) < 5e-2
        return torch.where(is_tie, top.indices[:, 1:], chosen)

    again = chosen_again(experts_rig, choose_second)

    assert again == {("model.layers.1.mlp.router", "backward")}


def test_near_tie_that_forward_and_recomputation_decide_alike_is_no_error(
    experts_rig: Rig,
) -> None:
    flipped = experts_rig.replay(do_nothing)[0].ports["model.layers.1.mlp.router", "output.1"]

    # Rounding to bfloat16 decides some of the near ties otherwise than the yardstick did.
    assert flipped.exact.num_near_ties
    assert chosen_again(experts_rig, lambda _scores, chosen: chosen) == set()


def test_error_made_only_when_computed_again_is_found_in_backward(rig: Rig) -> None:
    calls = []

    def forward(module: Any, x: Tensor, original: Callable[..., Any]) -> Any:
        calls.append(module)
        # What is saved for backward differs from what forward had.
        return original(x) if len(calls) == 1 else original(x * 1.5) / 1.5

    def plant(model: Any) -> None:
        compute_again("model.layers.1", reentrant=False)(model)
        wrap_forward("model.layers.1.mlp.act_fn", forward)(model)

    assert rig.failed(plant) == {("model.layers.1.mlp.act_fn", "backward")}
    assert len(calls) == 2


class _ChangesInPlace(nn.Module):
    """Has its argument changed by a child, which goes on computing with it, and uses it after."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.child = _Doubles()

    def forward(self, hidden_states: Tensor) -> Tensor:
        inner = self.linear(hidden_states)
        squares = self.child(inner)
        squares[:, ::2] = inner[:, ::2].mean(1, keepdim=True)
        result: Tensor = inner.masked_scatter(squares > 1, squares) + squares
        return result


class _Doubles(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        value.mul_(2)
        return value * value


@pytest.fixture(scope="module")
def in_place_rig(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    model = copy.deepcopy(llama)
    torch.manual_seed(2)
    model.model.layers[0].mlp = _ChangesInPlace()
    return Rig(model, tmp_path_factory.mktemp("in-place") / "yardstick", torch.float32)


@pytest.fixture(scope="module")
def caching_rig(llama: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    folder = tmp_path_factory.mktemp("caching")
    return Rig(llama, folder / "yardstick", torch.float32, use_cache=True)


@pytest.mark.parametrize("name", ["in_place_rig", "caching_rig"])
def test_what_a_call_changes_in_place_goes_through_backward(
    request: pytest.FixtureRequest, name: str
) -> None:
    rig = request.getfixturevalue(name)

    assert_gradients_are_plain(rig)
    assert rig.failed(do_nothing) == set()


def test_gradient_lost_by_what_a_call_changes_in_place_is_found_there(in_place_rig: Rig) -> None:
    def detach(_module: Any, value: Tensor, _original: Any) -> Tensor:
        value.mul_(2)
        return (value * value).detach()

    plant = wrap_forward("model.layers.0.mlp.child", detach)
    assert in_place_rig.failed(plant) == {("model.layers.0.mlp.child", "backward")}
