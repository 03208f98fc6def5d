"""Tokens divided over ranks between the blocks: norms and residual sums see some of them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from assay.devices.base import Device
from assay.parallel.tensor_parallel import layers, sequence
from assay.parallel.tensor_parallel.collectives import sum_over_ranks
from assay.parallel.tensor_parallel.decoder import apply_tensor_parallel
from assay.parallel.tensor_parallel.decoder_blocks import BlockError
from assay.parallel.tensor_parallel.sequence import SequenceError, apply_sequence_parallel
from packages.core.tests.subsystem.parallel.tiny_models import ARCHITECTURES, batch, build_model
from packages.core.tests.subsystem.parallel.training_runs import Oracle, differing_after_training


def compare(
    mesh: DeviceMesh, device: Device, oracle: Oracle, architecture: str, fault: str | None = None
) -> list[str]:
    def divide(model: nn.Module) -> None:
        apply_tensor_parallel(model, mesh["tp"])
        apply_sequence_parallel(model, mesh["tp"])
        if fault:
            break_sequence(fault)

    return differing_after_training(oracle, build_model(architecture), device.torch_device, divide)


def break_sequence(fault: str) -> None:
    faults: dict[str, tuple[Any, str, object]] = {
        "norms get no summed gradient": (layers, "sum_gradients", lambda whole, _: whole),
        "the sum is taken of other tokens": (
            layers,
            "sum_and_split",
            lambda summand, mesh, dim: (
                sum_over_ranks(summand, mesh)
                .flip(dim)
                .narrow(dim, 0, summand.shape[dim] // mesh.size())
            ),
        ),
        "tokens are gathered twice": (
            sequence,
            "gather_tokens",
            lambda part, mesh: torch.cat([part] * mesh.size(), 1),
        ),
    }
    setattr(*faults[fault])


@pytest.mark.parametrize(
    ("architecture", "num_ranks"),
    [
        *(pytest.param(name, 2, marks=pytest.mark.world(tp=2)) for name in ARCHITECTURES),
        *(pytest.param(name, 4, marks=pytest.mark.world(tp=4)) for name in ("llama", "mixtral")),
    ],
)
def test_a_model_with_divided_tokens_trains_as_on_one_rank(
    mesh: DeviceMesh, device: Device, oracle: Oracle, architecture: str, num_ranks: int
) -> None:
    assert compare(mesh, device, oracle, architecture) == []


@pytest.mark.world(tp=2)
@pytest.mark.parametrize(
    ("architecture", "fault", "found"),
    [
        (
            "llama",
            "norms get no summed gradient",
            "gradient 0 model.layers.1.post_attention_layernorm.weight",
        ),
        ("llama", "norms get no summed gradient", "gradient 0 model.layers.1.mlp.down_proj.bias"),
        ("granite", "the sum is taken of other tokens", "loss 0"),
        ("mixtral", "tokens are gathered twice", "loss 0"),
    ],
)
def test_a_broken_division_of_tokens_is_found(
    mesh: DeviceMesh, device: Device, oracle: Oracle, architecture: str, fault: str, found: str
) -> None:
    assert found in compare(mesh, device, oracle, architecture, fault)


@pytest.mark.world(tp=2)
def test_hidden_states_between_layers_are_this_ranks_tokens(mesh: DeviceMesh) -> None:
    seen: list[Tensor] = []

    def see(_module: nn.Module, _args: object, output: Tensor) -> None:
        seen.append(output.detach())

    whole = build_model("llama")
    divided = build_model("llama")
    apply_tensor_parallel(divided, mesh["tp"])
    apply_sequence_parallel(divided, mesh["tp"])
    for model in (whole, divided):
        model.get_submodule("model.layers.0").register_forward_hook(see)
        model.get_submodule("model.norm").register_forward_hook(see)
        model(**batch(0))
    expected_layer, expected_norm, layer, norm = seen
    assert type(layer) is Tensor
    tokens = expected_layer[:, 6 * mesh.get_local_rank() :][:, :6]  # 12 on 2 ranks
    torch.testing.assert_close(layer, tokens)
    torch.testing.assert_close(norm, expected_norm)


@pytest.mark.world(tp=2)
def test_what_cannot_be_divided_by_tokens_is_refused(mesh: DeviceMesh) -> None:
    model = build_model("llama")
    with pytest.raises(SequenceError) as caught:
        apply_sequence_parallel(model, mesh["tp"])
    assert str(caught.value) == (
        "model.layers.0.self_attn.o_proj is not divided over ranks; apply tensor parallelism first"
    )
    model = build_model("llama")
    apply_tensor_parallel(model, mesh["tp"])
    apply_sequence_parallel(model, mesh["tp"])
    with pytest.raises(SequenceError) as caught:
        model(input_ids=torch.ones(1, 7, dtype=torch.long))
    assert str(caught.value) == (
        "a sequence of 7 tokens cannot be divided evenly over 2 tensor-parallel ranks: "
        "7 is no multiple of 2"
    )
    model = build_model("llama")
    apply_tensor_parallel(model, mesh["tp"])
    model.get_submodule("model.layers.1").add_module("memory", nn.Linear(2, 3))
    with pytest.raises(BlockError, match=r"model.layers.1.memory.weight has shape \(3, 2\)"):
        apply_sequence_parallel(model, mesh["tp"])
