"""The recorded values of a run, and the values injected into its modules."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from assay.hooks.module_tracer import ActiveCall, ModuleTracer
from assay.hooks.tensors import Boundary
from assay.recording.modules import Recorder, routes_tokens
from assay.sites import Call, CallSite
from assay.trace import Trace, TraceWriter

EXACT = Boundary.exact_inputs_for(torch.bfloat16)
FINE = 1.0 + 2.0**-10  # what bfloat16 cannot hold


class Seeing(nn.Module):
    """Adds 2**-10 and remembers its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        self.seen.append(x.clone())
        return x + 2.0**-10


class Chain(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.one = Seeing()
        self.two = Seeing()
        self.between = between

    def forward(self, x: Tensor) -> Any:
        return self.two(self.between(self.one(x)))


def record(model: nn.Module, folder: Path, *args: Tensor, boundary: Boundary = EXACT) -> Trace:
    with (
        TraceWriter(folder, {}) as writer,
        ModuleTracer(Recorder(writer, boundary)).attached(model),
    ):
        model(*args)
    return Trace.open(folder)


def recorded(trace: Trace, module: str, port: str) -> list[float]:
    call = trace.find(CallSite(0, module))
    assert call is not None
    return [float(value) for value in trace.tensor(call, port).reshape(-1)]


ONE = torch.ones(1, 1, dtype=torch.float64)


def test_recorded_value_is_exact_and_the_injected_one_is_rounded(tmp_path: Path) -> None:
    model = Chain()
    trace = record(model, tmp_path / "t", ONE)

    assert recorded(trace, "one", "output") == [FINE]
    assert recorded(trace, "two", "input.x") == [FINE]
    assert model.two.seen[0].tolist() == [[1.0]]  # rounded to bfloat16
    assert recorded(trace, "two", "output") == [FINE]  # exact for the rounded input


def test_value_that_passes_two_boundaries_is_stored_once(tmp_path: Path) -> None:
    trace = record(Chain(), tmp_path / "t", ONE)

    one, two = (trace.find(CallSite(0, name)) for name in ("one", "two"))
    assert one is not None
    assert two is not None
    assert trace.stored(one, "output").digest == trace.stored(two, "input.x").digest


def test_value_changed_in_place_between_two_children_is_recorded_again(tmp_path: Path) -> None:
    model = Chain(lambda x: x.mul_(3.0))

    trace = record(model, tmp_path / "t", ONE)

    assert recorded(trace, "one", "output") == [FINE]
    assert recorded(trace, "two", "input.x") == [3.0]  # of the rounded value
    assert model.two.seen[0].tolist() == [[3.0]]


def test_argument_changed_in_place_is_a_result_of_the_call(tmp_path: Path) -> None:
    class Changing(nn.Module):
        def forward(self, x: Tensor) -> Any:
            x.add_(2.0**-10)
            return x * 2

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Changing()

        def forward(self, x: Tensor) -> Any:
            y = x * 4
            result = self.inner(y)
            return result + y

    trace = record(Outer(), tmp_path / "t", ONE)

    assert recorded(trace, "inner", "input.x") == [4.0]
    assert recorded(trace, "inner", "changed.x") == [4.0 + 2.0**-10]
    assert recorded(trace, "", "output") == [8.0 + 4.0]  # both handed on in bfloat16


def test_additions_to_a_cache_are_recorded_and_injected_rounded(tmp_path: Path) -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor, past_key_values: DynamicCache) -> Any:
            keys = x[:, None, :, :]
            past_key_values.update(keys + 2.0**-10, keys, 0)
            return x

    model, cache = Attention(), DynamicCache()
    with (
        TraceWriter(tmp_path / "t", {}) as writer,
        ModuleTracer(Recorder(writer, EXACT)).attached(model),
    ):
        model(torch.ones(1, 3, 2, dtype=torch.float64), cache)
        model(torch.ones(1, 1, 2, dtype=torch.float64), cache)
    trace = Trace.open(tmp_path / "t")

    shapes = [trace.stored(call, "changed.past_key_values.0.keys").shape for call in trace.calls]
    assert shapes == [(1, 1, 3, 2), (1, 1, 1, 2)]
    assert recorded(trace, "", "changed.past_key_values.0.keys") == [FINE] * 6
    keys: Tensor = cache.layers[0].keys  # type: ignore[assignment, union-attr]
    assert keys.unique().tolist() == [1.0]


def test_cache_of_a_float32_candidate_is_recorded_before_it_is_rounded(tmp_path: Path) -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor, past_key_values: DynamicCache) -> Any:
            keys = x[:, None, :, :]
            past_key_values.update(keys + 2.0**-40, keys, 0)
            return x

    model, boundary = Attention(), Boundary.exact_inputs_for(torch.float32)
    with (
        TraceWriter(tmp_path / "t", {}) as writer,
        ModuleTracer(Recorder(writer, boundary)).attached(model),
    ):
        model(torch.ones(1, 1, 1, dtype=torch.float64), DynamicCache())
    trace = Trace.open(tmp_path / "t")

    assert recorded(trace, "", "changed.past_key_values.0.keys") == [1.0 + 2.0**-40]


def test_integers_and_constants_are_recorded_unchanged(tmp_path: Path) -> None:
    class Embedding(nn.Module):
        def forward(self, ids: Tensor, use_cache: bool = True, mode: str = "x") -> Any:
            del use_cache, mode
            return ids.double()

    model = Embedding()
    with (
        TraceWriter(tmp_path / "t", {}) as writer,
        ModuleTracer(Recorder(writer, EXACT)).attached(model),
    ):
        model(torch.tensor([[300]]), use_cache=False)
    trace = Trace.open(tmp_path / "t")

    assert recorded(trace, "", "input.ids") == [300.0]
    assert dict(trace.calls[0].constants) == {"input.use_cache": False}


def test_items_of_tuples_and_dictionaries_have_separate_ports(tmp_path: Path) -> None:
    class Nested(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, None, dict[str, Tensor]]:
            return x, None, {"aux": 2 * x}

    trace = record(Nested(), tmp_path / "t", ONE)

    assert trace.calls[0].ports == ("input.x", "output.0", "output.2.aux")


def test_attention_probabilities_after_the_main_result_are_not_recorded(tmp_path: Path) -> None:
    class Eager(nn.Module):
        def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
            batch, length = input_ids.shape
            return input_ids.double(), torch.rand(batch, 2, length, length).softmax(-1)

    trace = record(Eager(), tmp_path / "t", torch.ones(1, 4, dtype=torch.long))

    assert "output.1" not in trace.calls[0].ports


def test_second_result_by_heads_is_recorded(tmp_path: Path) -> None:
    # Rotated queries and keys, (B, heads, T, head_dim) each, are no probabilities.
    class Rotary(nn.Module):
        def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
            q = torch.ones(*input_ids.shape, 8).unsqueeze(1)
            return q, 2 * q

    trace = record(Rotary(), tmp_path / "t", torch.ones(1, 4, dtype=torch.long))

    assert "output.1" in trace.calls[0].ports


class Experts(nn.Module):
    """Runs each token through the experts that were chosen for it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Any:
        parts = [
            expert(x) * (weights * (chosen == number)).sum(1, keepdim=True)
            for number, expert in enumerate(self.experts)
        ]
        return torch.stack(parts).sum(0)


class FusedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3, 3))
        self.act = nn.SiLU()

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Any:
        return self.act((x[:, None, None] @ self.weight[chosen]).sum(2) * weights[..., None]).sum(1)


class Waves(nn.Module):
    """A speech model: a waveform (B, N) and its mask (B, N)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, wave: Tensor, mask: Tensor, speaker: Tensor) -> Any:
        for layer in self.layers:
            wave = layer(wave * mask) + speaker.sum()
        return wave


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Tensor) -> Any:
        return self.inner(*args)


CHOICE = torch.tensor([[0, 3], [1, 0], [2, 4], [-1, 1]])  # 4 and -1 are on other ranks
TOKENS, SHARES = torch.randn(4, 3), torch.rand(4, 2)


@pytest.mark.parametrize("experts", [Experts(), FusedExperts()])
def test_calls_inside_of_a_group_of_experts_are_its_own_code(
    experts: nn.Module, tmp_path: Path
) -> None:
    choice = CHOICE.clamp(0, 3)
    trace = record(Outer(experts), tmp_path / "t", TOKENS, choice, SHARES, boundary=Boundary())

    assert [call.site.module for call in trace.calls] == ["", "inner"]


WAVES = (torch.randn(2, 5), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]), torch.randn(2, 7))


@pytest.mark.parametrize("model", [Waves(), Outer(Waves())])
def test_a_waveform_and_its_mask_are_not_tokens_and_their_experts(
    model: nn.Module, tmp_path: Path
) -> None:
    trace = record(model, tmp_path / "t", *WAVES, boundary=Boundary())

    names = [call.site.module for call in trace.calls]
    assert [name for name in names if "layers" in name] == names[-2:]


@pytest.mark.parametrize(
    ("choice", "is_choice"),
    [(CHOICE, True), (CHOICE + 1, False), (CHOICE - 1, False), (CHOICE.repeat(1, 3), False)],
)
def test_indices_of_experts_are_known_by_their_range(choice: Tensor, *, is_choice: bool) -> None:
    site = CallSite(0, "mlp.experts")
    arguments = {"x": TOKENS, "chosen": choice, "weights": torch.rand(choice.shape)}
    for caller, expected in (("mlp", is_choice), (None, False)):
        active = ActiveCall(Call(site, "Experts", caller, 0), FusedExperts(), arguments)
        assert routes_tokens(active) is expected


def test_boundary_without_rounding_changes_nothing(tmp_path: Path) -> None:
    model = Chain()

    trace = record(model, tmp_path / "t", ONE, boundary=Boundary())

    assert recorded(trace, "two", "output") == [1.0 + 2 * 2.0**-10]


def test_killed_run_keeps_the_finished_root_calls(tmp_path: Path) -> None:
    model = Chain()
    writer = TraceWriter(tmp_path / "t", {})
    with ModuleTracer(Recorder(writer, EXACT)).attached(model):
        model(ONE)
        model(2 * ONE)
    # The writer is not closed: as after kill -9.
    trace = Trace.open(tmp_path / "t")

    assert not trace.complete
    assert [call.site.step for call in trace.calls] == [0, 0, 0, 1, 1, 1]
    writer.close()
