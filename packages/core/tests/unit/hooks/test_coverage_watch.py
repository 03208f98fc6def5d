"""Usage of modules, parameters, experts and caches by the runs of a model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from assay.hooks.coverage_watch import UsageWatch, count_expert_tokens
from assay.hooks.module_tracer import ModuleTracer, NullHandler
from assay.hooks.suspension import FunctionMode
from assay.sites import RowMap


class Looking(nn.Module):
    """Calls `look` with its weight."""

    def __init__(self, look: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.weight, self.look = nn.Parameter(torch.ones(4, 4)), look

    def forward(self, input_ids: Tensor) -> None:
        self.look(self.weight)


def usage_of(model: nn.Module, *calls: Callable[[nn.Module], object]) -> dict[str, Any]:
    watch = UsageWatch(NullHandler())
    watch.add_parameters_of(model)
    with ModuleTracer(watch).attached(model), watch.reading(), torch.no_grad():
        for call in calls:
            call(model)
    return watch.to_json()


class Model(nn.Module):
    """A head that is never called, a scale that is never read, a layer whose weight others read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.inner = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(4))
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.inner.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.layer(input_ids.float().to(self.scale.dtype))
        self.scale.new_zeros(2) + torch.zeros_like(self.scale)[:2]
        return nn.functional.linear(hidden, self.inner.weight.t()).type_as(self.scale)


def test_called_modules_and_read_parameters() -> None:
    used = usage_of(Model(), lambda model: model(torch.ones(1, 4)))

    assert used["called"] == ["", "layer"]
    assert used["read"] == ["inner.weight", "layer.bias", "layer.weight", "tied.weight"]
    assert used["parameters"] == {
        "": ["scale"],
        "layer": ["layer.weight", "layer.bias"],
        "inner": ["inner.weight"],
        "head": ["head.weight", "head.bias"],
        "tied": ["tied.weight"],
    }


@pytest.mark.parametrize(
    "read",
    [
        lambda weight: weight.T,
        lambda weight: weight[0],
        lambda weight: weight.data_ptr(),
        lambda weight: torch.cat([weight, weight]),
        lambda weight: torch.ones(4).addmv(weight, torch.ones(4)),
        lambda weight: weight.to(torch.float64),
    ],
)
def test_operations_that_use_a_value_read_it(read: Callable[[Tensor], object]) -> None:
    assert usage_of(Looking(read), lambda model: model(torch.ones(1, 4)))["read"] == ["weight"]


@pytest.mark.parametrize(
    "look",
    [
        lambda weight: weight.dtype,
        lambda weight: weight.shape,
        lambda weight: weight.device,
        lambda weight: weight.size(0),
        lambda weight: weight.numel(),
        lambda weight: torch.ones(4).to(weight),
        lambda weight: torch.ones(4).type_as(weight),
        lambda weight: torch.ones(4).expand_as(weight),
        torch.zeros_like,
        lambda weight: weight.new_ones(3),
        lambda weight: weight.is_floating_point(),
    ],
)
def test_dtype_device_and_shape_do_not_read_a_value(look: Callable[[Tensor], object]) -> None:
    assert usage_of(Looking(look), lambda model: model(torch.ones(1, 4)))["read"] == []


def test_reads_outside_of_a_forward_pass_do_not_count() -> None:
    used = usage_of(
        Looking(lambda weight: weight.dtype),
        lambda model: model(torch.ones(1, 4)),
        lambda model: torch.stack(list(model.parameters())),
    )

    assert used["read"] == []


def test_reads_between_calls_of_a_generation_count() -> None:
    model, watch = Looking(lambda weight: weight.dtype), UsageWatch(NullHandler())
    watch.add_parameters_of(model)

    with ModuleTracer(watch).attached(model), watch.reading(), watch.reading_between_calls():
        model(torch.ones(1, 4))
        names = watch.unread
        torch.stack(list(model.parameters()))

    assert names
    assert (watch.unread, watch.read) == (set(), names)


def test_the_watch_of_reads_leaves_other_modes_alone() -> None:
    model, watch, seen = Looking(lambda weight: weight * 2), UsageWatch(NullHandler()), []
    watch.add_parameters_of(model)

    def call(func: Any, args: Any, kwargs: Any) -> Any:
        seen.append(func)
        return func(*args, **kwargs)

    with ModuleTracer(watch).attached(model), watch.reading(), watch.reading_between_calls():
        with FunctionMode(call):
            model(torch.ones(1, 4))
            seen.clear()
            torch.ones(1).exp()  # after the call that read the last parameter
        assert len(seen) == 2
        seen.clear()
        torch.ones(1).exp()

    assert not watch.unread
    assert not seen


def test_a_parameter_that_is_passed_to_a_module_is_read() -> None:
    class Router(nn.Module):
        def forward(self, tokens: Tensor, bias: Tensor) -> Tensor:
            return tokens

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.router = nn.Parameter(torch.ones(4)), Router()

        def forward(self, input_ids: Tensor) -> Tensor:
            output: Tensor = self.router(input_ids, self.bias)
            return output

    assert usage_of(Block(), lambda block: block(torch.ones(1, 4)))["read"] == ["bias"]


def test_a_parameter_that_a_module_returns_is_read() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.ones(4))

        def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
            return tokens, self.bias

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()

        def forward(self, input_ids: Tensor) -> Tensor:
            hidden: Tensor = self.attention(input_ids)[0]
            return hidden

    used = usage_of(Layer(), lambda layer: layer(torch.ones(1, 4)))

    assert used["read"] == ["attention.bias"]


def test_a_call_with_only_empty_tensors_does_not_count() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, input_ids: Tensor) -> Tensor:
            self.experts[1](input_ids[:0])
            output: Tensor = self.experts[0](input_ids)
            return output

    assert usage_of(Loop(), lambda loop: loop(torch.ones(1, 4)))["called"] == ["", "experts.0"]


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.ones(3, 4, 2))


ROWS = RowMap((0,), ((-1, 0, 1),))
TOKENS = torch.ones(3, 4)
INDICES = torch.tensor([[2, 0], [0, 1], [1, 3]])


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [
        # The first token is padding; index 3 is no expert of this group.
        ({"x": TOKENS, "indices": INDICES, "weights": torch.ones(3, 2)}, [1, 2, 0]),
        ({"x": TOKENS, "expert_size": [4, 0, 2]}, [4, 0, 2]),
        # Tokens of all experts one after the other, zero where an expert computes none.
        ({"x": torch.tensor([1, 0, 1, 0, 0, 0, 1, 0, 0.0])[:, None] * torch.ones(9, 4)}, [1, 0, 0]),
        ({"x": TOKENS, "y": TOKENS}, None),
    ],
)
def test_tokens_of_each_fused_expert_without_padding(
    arguments: dict[str, Any], counts: list[int] | None
) -> None:
    found = count_expert_tokens(Fused(), arguments, ROWS)

    assert (found if found is None else found.tolist()) == counts


def test_a_router_is_not_a_group_of_experts() -> None:
    class Router(nn.Linear):
        num_experts = 3

    assert count_expert_tokens(Router(4, 3), {"x": TOKENS}, ROWS) is None


@pytest.mark.parametrize(("row", "varied"), [(0, False), (1, True)])
def test_position_rows_that_never_differ_are_listed(row: int, *, varied: bool) -> None:
    class Rotary(nn.Module):
        def forward(self, position_ids: Tensor) -> Tensor:
            return position_ids

    positions = torch.arange(5).expand(3, 2, 5).clone()
    positions[1] += row
    used = usage_of(Rotary(), lambda rotary: rotary(position_ids=positions))

    assert used["equal_rows"] == ([] if varied else [".position_ids"])


def test_slots_of_the_last_call_are_never_read() -> None:
    class Cache:
        length = 0

        def get_seq_length(self) -> int:
            return self.length

    class Decoder(nn.Module):
        def forward(self, input_ids: Tensor, past: Cache) -> None:
            past.length += input_ids.shape[1]

    def generate(model: nn.Module) -> None:
        cache = Cache()
        for length in (5, 1, 1):
            model(torch.ones(2, length, dtype=torch.long), past=cache)

    used = usage_of(Decoder(), generate, generate)

    assert (used["cache_slots"], used["cache_slots_read"]) == (2 * 2 * 7, 2 * 2 * 6)
