"""Adapters by peft itself, which core has only where this package is installed."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from assay.models import load_model
from assay.training.trainers.adapters import (
    ADAPTER_FILE,
    AdapterError,
    adapter_tensors,
    add_lora,
    load_adapter,
    read_adapter,
    save_adapter,
)


@pytest.fixture
def adapted() -> nn.Module:
    return add_lora(load_model("micro:llama?trained=0", dtype="float32").model, dropout=0.1)


def test_only_the_adapter_is_trainable(adapted: nn.Module) -> None:
    trainable = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(trainable) == 56
    assert all(".lora_" in name for name in trainable)
    assert len(adapter_tensors(adapted)) == 56


def test_an_adapter_comes_back_bit_for_bit(adapted: nn.Module, tmp_path: Path) -> None:
    with torch.no_grad():
        for tensor in adapter_tensors(adapted).values():
            tensor.normal_()
    before = {name: tensor.clone() for name, tensor in adapter_tensors(adapted).items()}
    save_adapter(adapted, tmp_path)
    with torch.no_grad():
        for tensor in adapter_tensors(adapted).values():
            tensor.zero_()
    load_adapter(adapted, tmp_path)
    after = adapter_tensors(adapted)
    assert before.keys() == after.keys() == read_adapter(tmp_path).keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def lost(tensors: dict[str, Tensor], name: str) -> None:
    del tensors[name]


def emptied(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = torch.zeros(0)


def renamed(tensors: dict[str, Tensor], name: str) -> None:
    tensors[f"a.{name}"] = tensors.pop(name)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lost, "{name} has shape None, the model's (4, 256)"),
        (emptied, "{name} has shape (0,), the model's (4, 256)"),
        (renamed, "a.{name} has shape (4, 256), the model's None"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    adapted: nn.Module, tmp_path: Path, damage: object, problem: str
) -> None:
    save_adapter(adapted, tmp_path)
    tensors = read_adapter(tmp_path)
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
    assert callable(damage)
    damage(tensors, name)
    save_file(tensors, tmp_path / ADAPTER_FILE)
    with pytest.raises(AdapterError) as raised:
        load_adapter(adapted, tmp_path)
    assert str(raised.value) == (
        f"the adapter in {tmp_path / ADAPTER_FILE} cannot be loaded: {problem.format(name=name)}"
    )
