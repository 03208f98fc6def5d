"""Every boundary of every module of a divided model: plain tensors, and the parts in the layout."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from assay.devices.base import Device
from assay.parallel.rank_boundaries import Features, TensorLayout
from assay.parallel.tensor_parallel import apply_tensor_parallel
from packages.core.tests.subsystem.parallel.judging import differing
from packages.core.tests.subsystem.parallel.tiny_models import ARCHITECTURES, batch, build_model

# A boundary is the first tensor that goes into a module or comes out of it, by path and number of
# the call.
Boundary = tuple[str, str, int]


class Boundaries:
    """Values and gradients at all boundaries of one forward and backward pass."""

    def __init__(self, model: nn.Module) -> None:
        self.values: dict[Boundary, Tensor] = {}
        self.gradients: dict[Boundary, Tensor] = {}
        self.kinds: set[type] = set()
        self._num_calls: dict[str, int] = {}
        for path, module in model.named_modules():
            module.register_forward_pre_hook(self._see_input(path), with_kwargs=True)
            module.register_forward_hook(self._see_output(path))

    def _see_input(self, path: str) -> Callable[..., None]:
        def see(_module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            self._num_calls[path] = self._num_calls.get(path, -1) + 1
            self._see((path, "input", self._num_calls[path]), (*args, *kwargs.values()))

        return see

    def _see_output(self, path: str) -> Callable[..., None]:
        def see(_module: nn.Module, _args: tuple[object, ...], output: object) -> None:
            of_output = output.values() if isinstance(output, dict) else output
            values = tuple(of_output) if not isinstance(of_output, Tensor) else (of_output,)  # type: ignore[arg-type]
            self._see((path, "output", self._num_calls[path]), values)

        return see

    def _see(self, boundary: Boundary, values: tuple[object, ...]) -> None:
        tensors = [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]
        if not tensors:
            return
        tensor = tensors[0]
        self.kinds.add(type(tensor))
        self.values[boundary] = tensor.detach().cpu()
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self._see_gradient(boundary, gradient))

    def _see_gradient(self, boundary: Boundary, gradient: Tensor) -> None:
        self.kinds.add(type(gradient))
        self.gradients[boundary] = gradient.detach().cpu()


def pass_through(model: nn.Module, device: str) -> Boundaries:
    boundaries = Boundaries(model)
    model(**{name: value.to(device) for name, value in batch(0).items()}).loss.backward()
    return boundaries


def features_at(layout: TensorLayout, boundary: Boundary) -> Features | None:
    path, port, _ = boundary
    return (layout.input_features if port == "input" else layout.output_features).get(path)


def merge(parts: Tensor, features: Features | None, whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of what all ranks hold of each feature."""
    if features is None:
        return parts
    merged = torch.zeros(whole.shape, dtype=parts.dtype)
    merged.index_add_(features.dim, features.index, parts)
    merged = merged.to(mesh.device_type)
    dist.all_reduce(merged, group=mesh.get_group())
    return merged.cpu()


def wrong_boundaries(
    actual: Boundaries, noise: Boundaries, exact: Boundaries, layout: TensorLayout, mesh: DeviceMesh
) -> list[Boundary]:
    """Boundaries whose value is no part of the whole one, or whose gradients do not add up to it."""
    assert actual.values.keys() == exact.values.keys()
    assert actual.gradients.keys() == exact.gradients.keys()
    wrong = []
    for boundary in exact.values:
        features = features_at(layout, boundary)
        part, part_noise = (
            side.values[boundary] if features is None else features.cut(side.values[boundary])
            for side in (exact, noise)
        )
        if part.shape != actual.values[boundary].shape:
            wrong.append(boundary)
            continue
        sides = [{"value": actual.values[boundary]}, {"value": part_noise}, {"value": part}]
        if boundary in exact.gradients:
            gradient = actual.gradients[boundary]
            sides[0]["gradient"] = merge(gradient, features, exact.gradients[boundary], mesh)
            sides[1]["gradient"] = noise.gradients[boundary]
            sides[2]["gradient"] = exact.gradients[boundary]
        if differing(*sides):
            wrong.append(boundary)
    return wrong


def compare(
    mesh: DeviceMesh, device: Device, architecture: str, fault: str | None = None
) -> tuple[list[Boundary], Boundaries]:
    exact = pass_through(build_model(architecture).double(), "cpu")
    noise = pass_through(build_model(architecture).to(device.torch_device), device.torch_device)
    model = build_model(architecture).to(device.torch_device)
    layout = apply_tensor_parallel(model, mesh["tp"])
    if fault:
        layout = FAULTS[fault](layout)
    actual = pass_through(model, device.torch_device)
    return wrong_boundaries(actual, noise, exact, layout, mesh["tp"]), actual


@pytest.mark.world(tp=4)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_boundary_holds_what_the_layout_says(
    mesh: DeviceMesh, device: Device, architecture: str
) -> None:
    wrong, boundaries = compare(mesh, device, architecture)
    assert wrong == []
    assert boundaries.kinds == {Tensor}, "hooks get plain tensors only"
    # 2 layers: q, k, v or qkv and the rest; values and gradients at both sides of each.
    assert len(boundaries.gradients) > 40


def without(names: str) -> Callable[[TensorLayout], TensorLayout]:
    def leave_out(layout: TensorLayout) -> TensorLayout:
        kept = {path: f for path, f in layout.output_features.items() if not path.endswith(names)}
        return replace(layout, output_features=kept)

    return leave_out


def reversed_features(layout: TensorLayout) -> TensorLayout:
    """As many features in another order."""
    path = "model.layers.1.self_attn.o_proj"
    features = layout.input_features[path]
    other = {path: replace(features, index=features.index.flip(0))}
    return replace(layout, input_features={**layout.input_features, **other})


def neighbours_head(layout: TensorLayout) -> TensorLayout:
    """The key/value head that another rank has."""
    path = "model.layers.0.self_attn.v_proj"
    features = layout.output_features[path]
    other = {path: replace(features, index=(features.index + 8) % 16)}
    return replace(layout, output_features={**layout.output_features, **other})


FAULTS: dict[str, Callable[[TensorLayout], TensorLayout]] = {
    "a module is left out": without("1.mlp.up_proj"),
    "the order is another": reversed_features,
    "another head": neighbours_head,
}


@pytest.mark.world(tp=2)
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("a module is left out", ("model.layers.1.mlp.up_proj", "output", 0)),
        ("the order is another", ("model.layers.1.self_attn.o_proj", "input", 0)),
        ("another head", ("model.layers.0.self_attn.v_proj", "output", 0)),
    ],
)
def test_wrong_layout_is_found_at_its_boundary(
    mesh: DeviceMesh, device: Device, fault: str, expected: Boundary
) -> None:
    wrong, _ = compare(mesh, device, "llama", fault)
    assert wrong == [expected]


@pytest.mark.world(tp=4)
def test_layout_of_replicated_heads_and_fused_projections_is_the_one_computed_by_hand(
    mesh: DeviceMesh,
) -> None:
    # 4 query and 2 key/value heads of 8 features, 48 intermediate ones, on 4 ranks.
    rank = mesh.get_local_rank()
    layout = apply_tensor_parallel(build_model("phi3"), mesh["tp"])
    assert (layout.heads.query_heads, layout.heads.kv_heads) == ((rank,), (rank // 2,))
    qkv = layout.output_features["model.layers.0.self_attn.qkv_proj"]
    key = 32 + 8 * (rank // 2)
    starts = (8 * rank, key, key + 16)
    assert qkv.index.tolist() == [start + i for start in starts for i in range(8)]
    assert qkv.copies.tolist() == [1] * 8 + [2] * 16
    up = layout.output_features["model.layers.0.mlp.gate_up_proj"]
    assert up.index.tolist() == [start + 12 * rank + i for start in (0, 48) for i in range(12)]
    down = layout.input_features["model.layers.0.mlp.down_proj"]
    assert down.index.tolist() == [*range(12 * rank, 12 * rank + 12)]


@pytest.mark.world(tp=4)
def test_gradients_that_are_cut_add_up_to_the_whole_one(mesh: DeviceMesh) -> None:
    layout = apply_tensor_parallel(build_model("llama"), mesh["tp"])
    whole = torch.arange(1.0, 17.0).expand(2, 3, 16)
    features = layout.output_features["model.layers.0.self_attn.k_proj"]
    cut = features.cut_gradient(whole)
    assert cut.shape == (2, 3, 8)
    assert merge(cut, features, whole, mesh["tp"]).equal(whole)
    doubled = merge(features.cut(whole), features, whole, mesh["tp"])
    assert doubled.equal(2 * whole), "two ranks hold each head"
