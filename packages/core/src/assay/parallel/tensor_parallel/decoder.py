"""Tensor parallelism for Llama-type decoders of transformers, in place.

Query, key, value, gate and up projections, fused or not, are sharded by their output features;
o_proj and down_proj by their input features; embedding and head by the vocabulary. Everything else,
including the hidden states between the blocks, is whole on every rank. LoRA may wrap any projection:
the matrices B are then sharded like outputs, and A like inputs.
"""

from collections.abc import Mapping
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from assay.errors import UsageError
from assay.parallel.tensor_parallel.division import (
    Division,
    HeadShare,
    divide_by_heads,
    divide_evenly,
    fuse,
    share_heads,
)
from assay.parallel.tensor_parallel.layers import (
    ShardParameters,
    WithSummedGradients,
    divide_columns,
    divide_columns_and_gather,
    divide_experts,
    divide_rows,
    divide_vocabulary,
    replace_forward_of,
)
from assay.parallel.tensor_parallel.rank_boundaries import Features, TensorLayout

# Names of the projections that read a block's input, and of the one that makes its output.
_ATTENTION = ({"q_proj", "k_proj", "v_proj"}, {"qkv_proj"}), "o_proj"
_MLP = ({"gate_proj", "up_proj"}, {"gate_up_proj"}), "down_proj"
_EXPERTS = {"gate_up_proj", "down_proj"}


def apply_tensor_parallel(model: nn.Module, mesh_tp: DeviceMesh) -> TensorLayout:
    """Shard `model`, of which every rank has an equal copy, over the ranks of `mesh_tp`.

    Names of modules and parameters stay. Sharded parameters become DTensors; the others stay plain
    and get the same gradient on all ranks. Apply LoRA before; FSDP2, compilation, optimizers and hooks
    after. Experts that LoRA adapts keep whole parameters, of which each rank uses its part. Ranks draw
    different dropout masks for their heads and features.

    Returns: for each module boundary, the features of the whole tensor that this rank holds.
    Raises: UsageError for a model with unknown parts or with sizes that do not divide.
    """
    if mesh_tp.ndim != 1:
        raise UsageError(
            f"tensor parallelism needs a mesh of one axis, not of {mesh_tp.ndim}: {mesh_tp}"
        )
    modules = dict(model.named_modules())
    blocks = [(path, dict(module.named_children())) for path, module in modules.items()]
    attention = {path for path, children in blocks if _has(children, _ATTENTION)}
    if not attention:
        raise UsageError(
            f"{type(model).__name__} has no attention with q_proj, k_proj, v_proj (or qkv_proj) "
            "and o_proj: it cannot be divided over tensor-parallel ranks"
        )
    config: Any = modules[min(attention)].config
    shares = share_heads(config.num_attention_heads, config.num_key_value_heads, mesh_tp.size())
    dividing = _Dividing(mesh_tp, shares)
    for path, children in blocks:
        if path in attention:
            dividing.divide_attention(path, modules[path])
        elif _has(children, _MLP):
            dividing.divide_mlp(path, modules[path])
        elif modules[path]._parameters.keys() >= _EXPERTS:  # noqa: SLF001 - its own parameters
            dividing.divide_experts(path, modules[path])
    paths = {id(module): path for path, module in modules.items()}
    # A pipeline stage may lack either.
    if (embedding := cast("Any", model).get_input_embeddings()) is not None:
        divide_vocabulary(paths[id(embedding)], embedding, dividing.shards)
    if (head := cast("Any", model).get_output_embeddings()) is not None:
        for path, linear in _linears_of(paths[id(head)], head, "lora_B").items():
            divide_columns_and_gather(path, linear, dividing.shards)
    return dividing.layout


def _has(children: Mapping[str, nn.Module], block: tuple[tuple[set[str], ...], str]) -> bool:
    columns, row = block
    return row in children and any(one <= children.keys() for one in columns)


def _linears_of(path: str, projection: nn.Module, half: str) -> dict[str, nn.Module]:
    """Return the linear at `path` and the adapters' matrices `half` around it, by path.

    Raises: UsageError for another kind of adapter than plain LoRA.
    """
    base = getattr(projection, "base_layer", None)
    if base is None:
        return {path: projection}
    children = dict(projection.named_children())
    is_dora = bool(len(cast("Any", children.get("lora_magnitude_vector", ()))))
    if is_dora or half not in children:
        variant = "DoRA" if is_dora else type(projection).__name__
        raise UsageError(
            f"{path}: {variant} cannot be divided over tensor-parallel ranks, plain LoRA can"
        )
    adapters = children[half].named_children()
    return {f"{path}.base_layer": base} | {f"{path}.{half}.{name}": one for name, one in adapters}


class HeadsOfThisRank:
    """A model's configuration with the numbers of heads of this rank."""

    def __init__(self, config: object, share: HeadShare) -> None:
        self.__dict__.update(
            _config=config,
            num_attention_heads=len(share.query_heads),
            num_key_value_heads=len(share.kv_heads),
        )

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or "_config" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._config, name)


class _Dividing:
    """The division of one model in place, block by block."""

    def __init__(self, mesh: DeviceMesh, shares: tuple[HeadShare, ...]) -> None:
        self.shards = ShardParameters(mesh)
        self.shares = shares
        self.rank = mesh.get_local_rank()
        self.layout = TensorLayout(shares[self.rank])
        self.inputs, self.outputs = self.layout.input_features, self.layout.output_features

    def divide_attention(self, path: str, attention: nn.Module) -> None:
        module, share = cast("Any", attention), self.shares[self.rank]
        config = module.config
        of_query = config.num_attention_heads, [one.query_heads for one in self.shares]
        of_kv = config.num_key_value_heads, [one.kv_heads for one in self.shares]
        query, kv = (
            divide_by_heads(number, module.head_dim, heads) for number, heads in (of_query, of_kv)
        )
        columns = {"q_proj": query, "k_proj": kv, "v_proj": kv, "qkv_proj": fuse(query, kv, kv)}
        self._divide_linears(path, attention, columns, {"o_proj": query})
        norms = {
            "q_norm": divide_by_heads(of_query[0], 1, of_query[1]),
            "k_norm": divide_by_heads(of_kv[0], 1, of_kv[1]),
        }
        self._divide_norms_of_heads(path, attention, norms, {*columns, "o_proj"})
        module.num_key_value_groups = share.group_size
        if hasattr(module, "num_heads"):
            module.num_heads = len(share.query_heads)
        if hasattr(module, "num_key_value_heads"):
            module.num_key_value_heads = len(share.kv_heads)
        if hasattr(module, "qkv_proj"):
            # The attention's forward splits the fused output by the numbers in its configuration.
            module.config = HeadsOfThisRank(config, share)

    def _divide_norms_of_heads(
        self, path: str, attention: nn.Module, norms: Mapping[str, Division], linears: set[str]
    ) -> None:
        """Divide the norms of single heads, the only other modules with parameters in attention."""
        for name, child in [("", attention), *attention.named_children()]:
            at = f"{path}.{name}".removesuffix(".")
            parameters = dict(child.named_parameters(recurse=bool(name)))
            if name in linears or not parameters:
                continue
            for parameter_name, parameter in parameters.items():
                is_of_heads = parameter.shape == (cast("int", attention.head_dim),)
                if name not in norms or not is_of_heads:
                    raise _make_unknown_parameter_error(f"{at}.{parameter_name}", parameter)
            replace_forward_of(child, WithSummedGradients, self.shards.mesh)
            self.inputs[at] = self.outputs[at] = Features.of(norms[name], self.rank, dim=-2)

    def divide_mlp(self, path: str, mlp: nn.Module) -> None:
        half = divide_evenly(cast("Any", mlp).down_proj.in_features, len(self.shares))
        columns = {"gate_proj": half, "up_proj": half, "gate_up_proj": fuse(half, half)}
        self._divide_linears(path, mlp, columns, {"down_proj": half})
        self._note_activations(path, mlp, half)

    def divide_experts(self, path: str, experts: nn.Module) -> None:
        for name, parameter in experts.named_parameters(recurse=False):
            if name not in _EXPERTS or parameter.dim() != 3:
                raise _make_unknown_parameter_error(f"{path}.{name}", parameter)
        half = divide_evenly(cast("Any", experts).down_proj.shape[-1], len(self.shares))
        divide_experts(path, experts, half, self.shards)
        self._note_activations(path, experts, half)

    def _note_activations(self, path: str, block: nn.Module, division: Division) -> None:
        for name, child in block.named_children():
            if not [*child.parameters()]:
                at = f"{path}.{name}"
                self.inputs[at] = self.outputs[at] = Features.of(division, self.rank)

    def _divide_linears(
        self,
        path: str,
        block: nn.Module,
        columns: Mapping[str, Division],
        rows: Mapping[str, Division],
    ) -> None:
        """Divide the linears of a block by output features (`columns`) and input features (`rows`)."""
        for name, child in block.named_children():
            at = f"{path}.{name}".removeprefix(".")
            if name in columns:
                features = self.outputs[at] = Features.of(columns[name], self.rank)
                for inner, linear in _linears_of(at, child, "lora_B").items():
                    divide_columns(inner, linear, columns[name], self.shards)
                    self.outputs[inner] = features
            elif name in rows:
                features = self.inputs[at] = Features.of(rows[name], self.rank)
                for inner, linear in _linears_of(at, child, "lora_A").items():
                    divide_rows(inner, linear, self.shards)
                    self.inputs[inner] = features
                for inner, _ in getattr(child, "lora_dropout", nn.ModuleDict()).named_children():
                    at_dropout = f"{at}.lora_dropout.{inner}"
                    self.inputs[at_dropout] = self.outputs[at_dropout] = features


def _make_unknown_parameter_error(path: str, parameter: nn.Parameter) -> UsageError:
    return UsageError(
        f"{path} has shape {tuple(parameter.shape)}: what it would be on one tensor-parallel rank is"
        " not known"
    )
