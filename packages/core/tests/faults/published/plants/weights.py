"""Faults in how weights are made or filled, each beside the same code without it.

`merged_weight` and `quantised_weight` also make the models that the plants are in (`models.py`).
"""

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from assay.models import resolve_model

LAYER = 1
PROJECTION = f"model.layers.{LAYER}.self_attn.q_proj.weight"
# Of an adapter that is merged with a negative weight; columns of a group of GPTQ.
MERGE_WEIGHT, GROUP = -0.5, 32


def merged_without_sign(model: Any) -> None:
    """peft#2796: the root of the weight's size is applied to both factors, its sign is lost."""
    _replace(model, PROJECTION, merged_weight(abs(MERGE_WEIGHT)))


def merged_with_sign(model: Any) -> None:
    """No fault."""
    _replace(model, PROJECTION, merged_weight(MERGE_WEIGHT))


def errors_written_beside_the_group(model: Any) -> None:
    """mlx-lm#1878: errors of later groups are looked for at columns counted from the first."""
    _replace(model, PROJECTION, quantised_weight(num_groups_with_errors=1))


def errors_written_for_all_groups(model: Any) -> None:
    """No fault."""
    _replace(model, PROJECTION, quantised_weight(num_groups_with_errors=None))


def part_of_expert_not_filled(model: Any) -> None:
    """sglang#36438: of presharded experts one shard is loaded, the rest stays as it was made."""
    _fill_expert(model, 1)


def expert_filled(model: Any) -> None:
    """No fault."""
    _fill_expert(model, 2)


def initialised_again_after_load(model: Any) -> None:
    """transformers#46620: a weight that was loaded is drawn anew, and the report of it is clean."""
    weight = model.get_parameter(PROJECTION)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(weight.shape, generator=generator) * model.config.initializer_range
    _replace(model, PROJECTION, drawn)


def loaded_again(model: Any) -> None:
    """No fault."""
    _replace(model, PROJECTION, stored("llama")[PROJECTION])


def initialised_once_too_often(model: Any) -> None:
    """transformers#17877: scaled projections are drawn again for each module above them."""
    _initialise(model, num_times=2)


def initialised_once(model: Any) -> None:
    """No fault."""
    _initialise(model, num_times=1)


def merged_weight(weight: float) -> Tensor:
    """The projection of micro:llama with an adapter merged into it."""
    base: Tensor = stored("llama")[PROJECTION].float()
    generator = torch.Generator().manual_seed(0)
    down = torch.randn(8, base.shape[1], generator=generator) / base.shape[1] ** 0.5
    up = torch.randn(base.shape[0], 8, generator=generator) * 0.1
    merged: Tensor = base + weight * (up @ down)
    return merged


def quantised_weight(num_groups_with_errors: int | None) -> Tensor:
    """The projection of micro:llama in 4 bits by GPTQ.

    num_groups_with_errors: in how many groups of columns errors go on to later ones; None: in all.
    Source: Frantar et al., GPTQ, 2023, algorithm 1.
    """
    weight = stored("llama")[PROJECTION].double()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, weight.shape[1], generator=generator).double()
    inputs = inputs.cumsum(1)  # columns that go together, or errors would go nowhere
    hessian = inputs.T @ inputs / len(inputs)
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian))
    inverse = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    scale = weight.abs().amax(1, keepdim=True) / 7
    for column in range(weight.shape[1]):
        rounded = (weight[:, column : column + 1] / scale).round().clamp(-8, 7) * scale
        error = (weight[:, column : column + 1] - rounded) / inverse[column, column]
        weight[:, column : column + 1] = rounded
        if num_groups_with_errors is None or column // GROUP < num_groups_with_errors:
            weight[:, column + 1 :] -= error @ inverse[column : column + 1, column + 1 :]
    return weight.float()


def stored(recipe: str) -> dict[str, Tensor]:
    """The weights of a recipe as its file has them."""
    found = resolve_model(f"micro:{recipe}").recipe
    assert found is not None
    return load_file(Path(found.folder) / "model.safetensors")


def _initialise(model: Any, num_times: int) -> None:
    """Make the matrices of `micro:llama?trained=0` anew; its norms are no longer as they are made."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = copy.deepcopy(model.config)  # which takes on the dtype
        fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        projection = fresh.get_parameter(f"model.layers.{LAYER}.self_attn.o_proj.weight")
        for _ in range(num_times - 1):
            torch.nn.init.normal_(projection, std=model.config.initializer_range)
    for name, parameter in fresh.named_parameters():
        if parameter.dim() > 1:
            _replace(model, name, parameter.bfloat16())


def _fill_expert(model: Any, num_shards: int) -> None:
    name = f"model.layers.{LAYER}.mlp.experts.down_proj"
    experts = model.get_parameter(name)
    filled = torch.zeros_like(experts)
    half = filled.shape[1] // 2
    filled[:, : half * num_shards] = experts[:, : half * num_shards]
    _replace(model, name, filled)


def _replace(model: Any, name: str, weight: Tensor) -> None:
    with torch.no_grad():
        model.get_parameter(name).copy_(weight)
