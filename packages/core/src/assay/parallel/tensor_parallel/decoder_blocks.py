"""Find the parts of a Llama-type decoder by the names of their projections.

Attention has q_proj, k_proj, v_proj (or qkv_proj) and o_proj; an MLP has gate_proj, up_proj (or
gate_up_proj) and down_proj; experts are one module with three-dimensional parameters
gate_up_proj and down_proj. LoRA layers may wrap any linear.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, cast

from torch import nn

from assay.errors import UsageError


def make_unknown_parameter_error(path: str, parameter: nn.Parameter) -> UsageError:
    """Make the error for a parameter without a defined division."""
    return UsageError(
        f"{path} has shape {tuple(parameter.shape)}: what it would be on one tensor-parallel rank is"
        " not known"
    )


@dataclass(frozen=True, slots=True)
class Adapter:
    """One LoRA adapter of a projection: its matrices A and B, and their paths."""

    a_path: str
    a: nn.Module
    b_path: str
    b: nn.Module
    dropout_path: str


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear and its LoRA adapters."""

    path: str
    """Path of the outermost module."""
    base_path: str
    """Path of the linear; equal to `path` without LoRA."""
    base: nn.Module
    adapters: tuple[Adapter, ...] = ()


@dataclass(frozen=True, slots=True)
class ColumnsAndRow:
    """A module of column-parallel linears and one row-parallel linear."""

    kind: Literal["attention", "mlp"]
    path: str
    module: nn.Module
    columns: tuple[Projection, ...]
    """One fused linear, or q_proj, k_proj and v_proj, or gate_proj and up_proj."""
    row: Projection


@dataclass(frozen=True, slots=True)
class Experts:
    """All experts of a layer."""

    path: str
    module: nn.Module
    has_adapters: bool
    """True if LoRA changes their parameters during each call."""


Block = ColumnsAndRow | Experts

# Kind of a block, names of its column-parallel linears, name of its row-parallel one.
_LINEARS: tuple[tuple[Literal["attention", "mlp"], tuple[str, ...], str], ...] = (
    ("attention", ("q_proj", "k_proj", "v_proj"), "o_proj"),
    ("attention", ("qkv_proj",), "o_proj"),
    ("mlp", ("gate_proj", "up_proj"), "down_proj"),
    ("mlp", ("gate_up_proj",), "down_proj"),
)


def find_blocks(model: nn.Module) -> list[Block]:
    """Find the blocks of `model`, in its order.

    Raises: UsageError without attention, or for an adapter that is not plain LoRA.
    """
    blocks = list(_blocks(model))
    if not any(block.kind == "attention" for block in blocks if isinstance(block, ColumnsAndRow)):
        raise UsageError(
            f"{type(model).__name__} has no attention with q_proj, k_proj, v_proj (or qkv_proj) "
            "and o_proj: it cannot be divided over tensor-parallel ranks"
        )
    return blocks


def _blocks(model: nn.Module) -> Iterator[Block]:
    for path, module in model.named_modules():
        children = dict(module.named_children())
        parameters = dict(module.named_parameters(recurse=False))
        for kind, columns, row in _LINEARS:
            if {*columns, row} <= children.keys():
                *found, last = (
                    projection_at(f"{path}.{name}".removeprefix("."), children[name])
                    for name in (*columns, row)
                )
                yield ColumnsAndRow(kind, path, module, tuple(found), last)
        if {"gate_up_proj", "down_proj"} <= parameters.keys():
            for name, parameter in parameters.items():
                if name not in ("gate_up_proj", "down_proj") or parameter.dim() != 3:
                    raise make_unknown_parameter_error(f"{path}.{name}", parameter)
            yield Experts(path, module, path.rpartition(".")[2] == "base_layer")


def projection_at(path: str, module: nn.Module) -> Projection:
    """Find the linear and the LoRA adapters in `module` at `path`.

    Raises: UsageError for another kind of adapter.
    """
    base = getattr(module, "base_layer", None)
    if base is None:
        return Projection(path, path, module)
    children = dict(module.named_children())
    is_dora = bool(list(children.pop("lora_magnitude_vector", nn.ModuleDict()).children()))
    if is_dora or "lora_A" not in children or "lora_B" not in children:
        variant = "DoRA" if is_dora else type(module).__name__
        raise UsageError(
            f"{path}: {variant} cannot be divided over tensor-parallel ranks, plain LoRA can"
        )
    halves_a = cast("nn.ModuleDict", children["lora_A"])
    halves_b = cast("nn.ModuleDict", children["lora_B"])
    adapters = tuple(
        Adapter(
            f"{path}.lora_A.{adapter}",
            halves_a[adapter],
            f"{path}.lora_B.{adapter}",
            halves_b[adapter],
            f"{path}.lora_dropout.{adapter}",
        )
        for adapter in halves_a
    )
    return Projection(path, f"{path}.base_layer", base, adapters)
