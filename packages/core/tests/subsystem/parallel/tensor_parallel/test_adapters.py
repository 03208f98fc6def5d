"""LoRA on divided models: adapters train on several ranks as on one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from assay.devices.base import Device
from assay.errors import UsageError
from assay.parallel import tensor_parallel
from assay.parallel.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    apply_tensor_parallel,
)
from packages.core.tests.subsystem.parallel.tiny_models import (
    ARCHITECTURES,
    add_lora,
    build_model,
    draw_parameters,
)
from packages.core.tests.subsystem.parallel.training_runs import (
    Oracle,
    differing_after_training,
    train_whole,
)

Options = dict[str, Any]


def build_with_lora(architecture: str, **options: Any) -> nn.Module:
    """Adapters on all linears and experts but the head."""
    model: nn.Module = add_lora(build_model(architecture), target_modules="all-linear", **options)
    draw_parameters(model)
    return model


def compare(mesh: DeviceMesh, device: Device, oracle: Oracle, model: nn.Module) -> list[str]:
    return differing_after_training(
        oracle, model, device.torch_device, lambda model: apply_tensor_parallel(model, mesh["tp"])
    )


@pytest.fixture
def oracle_with_lora(architecture: str, options: Options, device: Device) -> Oracle:
    return train_whole(partial(build_with_lora, architecture, **options), device.torch_device)


@pytest.mark.parametrize(
    ("architecture", "num_ranks"),
    [
        *(pytest.param(name, 2, marks=pytest.mark.world(tp=2)) for name in ARCHITECTURES),
        *(pytest.param(name, 4, marks=pytest.mark.world(tp=4)) for name in ("llama", "phi3")),
    ],
)
@pytest.mark.parametrize("options", [{}], ids=[""])
def test_adapters_train_on_several_ranks_as_on_one(
    mesh: DeviceMesh,
    device: Device,
    oracle_with_lora: Oracle,
    architecture: str,
    num_ranks: int,
    options: Options,
) -> None:
    model = build_with_lora(architecture, **options)
    assert compare(mesh, device, oracle_with_lora, model) == []


@pytest.mark.world(tp=2)
@pytest.mark.parametrize(
    ("architecture", "options"), [("llama", {"lora_bias": True, "use_rslora": True})]
)
def test_variants_of_adapters_train_on_two_ranks_as_on_one(
    mesh: DeviceMesh, device: Device, oracle_with_lora: Oracle, architecture: str, options: Options
) -> None:
    model = build_with_lora(architecture, **options)
    assert compare(mesh, device, oracle_with_lora, model) == []


FAULTS: dict[str, tuple[str, Callable[..., object]]] = {
    "gradients of inputs are not summed": ("sum_gradients", lambda whole, _: whole),
    "outputs are not summed": ("sum_over_ranks", lambda summand, _: summand),
}


@pytest.mark.world(tp=2)
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("gradients of inputs are not summed", "self_attn.q_proj.lora_A.default.weight"),
        ("outputs are not summed", "mlp.down_proj.lora_B.default.weight"),
    ],
)
def test_broken_adapter_is_found(mesh: DeviceMesh, device: Device, fault: str, found: str) -> None:
    oracle = train_whole(partial(build_with_lora, "llama"), device.torch_device)
    setattr(tensor_parallel, *FAULTS[fault])
    differing = compare(mesh, device, oracle, build_with_lora("llama"))
    assert f"gradient 0 base_model.model.model.layers.1.{found}" in differing


@pytest.mark.world(tp=2)
def test_each_half_is_divided_where_its_linear_is(mesh: DeviceMesh) -> None:
    model = build_with_lora("llama")
    layout = apply_tensor_parallel(model, mesh["tp"])
    path = "base_model.model.model.layers.0.self_attn"
    query, output = model.get_submodule(f"{path}.q_proj"), model.get_submodule(f"{path}.o_proj")
    assert isinstance(query.get_submodule("lora_B.default"), ColumnParallelLinear)
    assert type(query.get_submodule("lora_A.default")) is nn.Linear
    assert isinstance(output.get_submodule("lora_A.default"), RowParallelLinear)
    assert type(output.get_submodule("lora_B.default")) is nn.Linear
    part = [*range(16 * mesh.get_local_rank(), 16 * mesh.get_local_rank() + 16)]
    for end in ("q_proj", "q_proj.base_layer", "q_proj.lora_B.default"):
        assert layout.output_features[f"{path}.{end}"].index.tolist() == part
    for end in (
        "o_proj",
        "o_proj.base_layer",
        "o_proj.lora_A.default",
        "o_proj.lora_dropout.default",
    ):
        assert layout.input_features[f"{path}.{end}"].index.tolist() == part


@pytest.mark.world(tp=2)
def test_other_adapters_are_refused(mesh: DeviceMesh) -> None:
    model = build_with_lora("llama", use_dora=True)
    with pytest.raises(UsageError) as caught:
        apply_tensor_parallel(model, mesh["tp"])
    assert str(caught.value) == (
        "base_model.model.model.layers.0.self_attn.q_proj: DoRA cannot be divided over "
        "tensor-parallel ranks, plain LoRA can"
    )
