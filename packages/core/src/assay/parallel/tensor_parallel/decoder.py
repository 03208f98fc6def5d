"""Tensor parallelism for Llama-type decoders of transformers, in place.

Query, key, value, gate and up projections, fused or not, are sharded by their output features;
o_proj and down_proj by their input features; embedding and head by the vocabulary. Everything else,
including the hidden states between the blocks, is whole on every rank.
"""

from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from assay.errors import UsageError
from assay.parallel.tensor_parallel.decoder_blocks import (
    Block,
    ColumnsAndRow,
    Experts,
    Projection,
    find_blocks,
    make_unknown_parameter_error,
    projection_at,
)
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

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# The kinds of heads of a `HeadShare`, and their numbers in a configuration.
_KINDS_OF_HEADS = {"query_heads": "num_attention_heads", "kv_heads": "num_key_value_heads"}


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
    blocks = find_blocks(model)
    config: Any = next(
        block.module.config
        for block in blocks
        if isinstance(block, ColumnsAndRow) and block.kind == "attention"
    )
    shares = share_heads(config.num_attention_heads, config.num_key_value_heads, mesh_tp.size())
    dividing = _Dividing(mesh_tp, shares)
    for block in blocks:
        if isinstance(block, Experts):
            dividing.divide_experts(block)
        elif block.kind == "attention":
            dividing.divide_attention(block)
        else:
            dividing.divide_mlp(block)
    paths = {id(module): path for path, module in model.named_modules()}
    # A pipeline stage may lack either.
    if (embedding := cast("Any", model).get_input_embeddings()) is not None:
        divide_vocabulary(paths[id(embedding)], embedding, dividing.shards)
    if (head := cast("Any", model).get_output_embeddings()) is not None:
        projection = projection_at(paths[id(head)], head)
        divide_columns_and_gather(projection.base_path, projection.base, dividing.shards)
        for adapter in projection.adapters:
            divide_columns_and_gather(adapter.b_path, adapter.b, dividing.shards)
    return dividing.layout


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

    def divide_attention(self, block: ColumnsAndRow) -> None:
        module = cast("Any", block.module)
        config, share = module.config, self.shares[self.rank]
        query, kv = (self._divide_heads(config, kind, module.head_dim) for kind in _KINDS_OF_HEADS)
        self._divide_linears(block, (query, kv, kv), query)
        self._divide_norms_of_heads(block, config)
        module.num_key_value_groups = share.group_size
        if hasattr(module, "num_heads"):
            module.num_heads = len(share.query_heads)
        if hasattr(module, "num_key_value_heads"):
            module.num_key_value_heads = len(share.kv_heads)
        if len(block.columns) == 1:
            # The attention's forward splits the fused output by the numbers in its configuration.
            module.config = HeadsOfThisRank(config, share)

    def _divide_heads(self, config: "PretrainedConfig", kind: str, head_dim: int) -> Division:
        num_heads: int = getattr(config, _KINDS_OF_HEADS[kind])
        return divide_by_heads(num_heads, head_dim, [getattr(share, kind) for share in self.shares])

    def _divide_norms_of_heads(self, block: ColumnsAndRow, config: "PretrainedConfig") -> None:
        """Divide the norms of single heads, the only other modules with parameters in attention."""
        projections = {p.path for p in (*block.columns, block.row)}
        for name, child in [("", block.module), *block.module.named_children()]:
            path = f"{block.path}.{name}".removesuffix(".")
            parameters = dict(child.named_parameters(recurse=bool(name)))
            if path in projections or not parameters:
                continue
            for parameter_name, parameter in parameters.items():
                is_of_heads = parameter.shape == (cast("int", block.module.head_dim),)
                if name not in ("q_norm", "k_norm") or not is_of_heads:
                    raise make_unknown_parameter_error(f"{path}.{parameter_name}", parameter)
            replace_forward_of(child, WithSummedGradients, self.shards.mesh)
            division = self._divide_heads(
                config, "query_heads" if name == "q_norm" else "kv_heads", head_dim=1
            )
            self.inputs[path] = self.outputs[path] = Features.of(division, self.rank, dim=-2)

    def divide_mlp(self, block: ColumnsAndRow) -> None:
        size = cast("int", block.row.base.in_features)
        half = divide_evenly(size, len(self.shares))
        self._divide_linears(block, (half, half), half)
        self._note_activations(block, half)

    def divide_experts(self, block: Experts) -> None:
        size = cast("Any", block.module).down_proj.shape[-1]
        half = divide_evenly(size, len(self.shares))
        divide_experts(block, half, self.shards)
        self._note_activations(block, half)

    def _note_activations(self, block: Block, division: Division) -> None:
        for name, child in block.module.named_children():
            if not [*child.parameters()]:
                path = f"{block.path}.{name}"
                self.inputs[path] = self.outputs[path] = Features.of(division, self.rank)

    def _divide_linears(
        self, block: ColumnsAndRow, parts: tuple[Division, ...], row: Division
    ) -> None:
        """Divide all linears of a block; `parts` are those of its column-parallel weights, fused or not."""
        divisions = parts if len(block.columns) == len(parts) else (fuse(*parts),)
        for projection, division in zip(block.columns, divisions, strict=True):
            self._divide_columns(projection, division)
        self._divide_rows(block.row, row)

    def _divide_columns(self, projection: Projection, division: Division) -> None:
        """Divide a projection and its adapters' B matrices by output features; A stays whole."""
        features = Features.of(division, self.rank)
        divide_columns(projection.base_path, projection.base, division, self.shards)
        self.outputs[projection.path] = self.outputs[projection.base_path] = features
        for adapter in projection.adapters:
            divide_columns(adapter.b_path, adapter.b, division, self.shards)
            self.outputs[adapter.b_path] = features

    def _divide_rows(self, projection: Projection, division: Division) -> None:
        """Divide a projection and its adapters' A matrices by input features; B stays whole."""
        features = Features.of(division, self.rank)
        divide_rows(projection.base_path, projection.base, self.shards)
        self.inputs[projection.path] = self.inputs[projection.base_path] = features
        for adapter in projection.adapters:
            divide_rows(adapter.a_path, adapter.a, self.shards)
            self.inputs[adapter.a_path] = features
            self.inputs[adapter.dropout_path] = self.outputs[adapter.dropout_path] = features
