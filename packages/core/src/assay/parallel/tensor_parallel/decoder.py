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
    Attention,
    Block,
    BlockError,
    Experts,
    Mlp,
    Projection,
    find_blocks,
    projection_at,
)
from assay.parallel.tensor_parallel.division import Division, divide_by_heads, divide_evenly, fuse
from assay.parallel.tensor_parallel.heads import HeadShare, share_heads
from assay.parallel.tensor_parallel.layers import (
    ShardParameters,
    WithSummedGradients,
    divide_columns,
    divide_columns_and_gather,
    divide_experts,
    divide_rows,
    divide_vocabulary,
    divide_whole_experts,
    replace_forward_of,
)
from assay.parallel.tensor_parallel.layout import Features, TensorLayout

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def make_mesh_axis_error(mesh: DeviceMesh) -> UsageError:
    """Make the error for `mesh`."""
    return UsageError(f"tensor parallelism needs a mesh of one axis, not of {mesh.ndim}: {mesh}")


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
        raise make_mesh_axis_error(mesh_tp)
    blocks = find_blocks(model)
    config = _config_of(blocks)
    shares = share_heads(config.num_attention_heads, config.num_key_value_heads, mesh_tp.size())
    dividing = _Dividing(mesh_tp, shares)
    for block in blocks:
        dividing.divide(block)
    paths = {id(module): path for path, module in model.named_modules()}
    # A pipeline stage may lack either.
    if (embedding := cast("Any", model).get_input_embeddings()) is not None:
        divide_vocabulary(paths[id(embedding)], embedding, dividing.shards)
    if (head := cast("Any", model).get_output_embeddings()) is not None:
        dividing.divide_head(projection_at(paths[id(head)], head))
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
        self.num_ranks = mesh.size()
        self.rank = mesh.get_local_rank()
        self.inputs: dict[str, Features] = {}
        self.outputs: dict[str, Features] = {}
        self.layout = TensorLayout(shares[self.rank], self.inputs, self.outputs)

    def divide(self, block: Block) -> None:
        if isinstance(block, Attention):
            self.divide_attention(block)
        elif isinstance(block, Mlp):
            self.divide_mlp(block)
        else:
            self.divide_experts(block)

    def divide_attention(self, block: Attention) -> None:
        module = cast("Any", block.module)
        head_dim: int = module.head_dim
        query = self._divide_heads(module.config.num_attention_heads, head_dim, "query_heads")
        kv = self._divide_heads(module.config.num_key_value_heads, head_dim, "kv_heads")
        divisions = (query, kv, kv) if len(block.columns) == 3 else (fuse(query, kv, kv),)
        for projection, division in zip(block.columns, divisions, strict=True):
            self.divide_columns(projection, division)
        self.divide_rows(block.row, query)
        self._divide_norms_of_heads(block)
        share = self.shares[self.rank]
        module.num_key_value_groups = share.group_size
        for name, number in (
            ("num_heads", len(share.query_heads)),
            ("num_key_value_heads", len(share.kv_heads)),
        ):
            if hasattr(module, name):
                setattr(module, name, number)
        if len(block.columns) == 1:
            # The attention's forward splits the fused output by the numbers in its configuration.
            module.config = HeadsOfThisRank(module.config, share)

    def _divide_heads(self, num_heads: int, head_dim: int, kind: str) -> Division:
        return divide_by_heads(num_heads, head_dim, [getattr(share, kind) for share in self.shares])

    def _divide_norms_of_heads(self, block: Attention) -> None:
        """Divide the norms of single heads, the only other modules with parameters in attention."""
        projections = {p.path for p in (*block.columns, block.row)}
        for name, child in block.module.named_children():
            path = f"{block.path}.{name}"
            parameters = dict(child.named_parameters())
            if path in projections or not parameters:
                continue
            head_dim = cast("int", block.module.head_dim)
            for parameter_name, parameter in parameters.items():
                if parameter.shape != (head_dim,) or name not in ("q_norm", "k_norm"):
                    raise BlockError.unknown_parameter(
                        f"{path}.{parameter_name}", tuple(parameter.shape)
                    )
            replace_forward_of(child, WithSummedGradients, self.shards.mesh)
            kind = "query_heads" if name == "q_norm" else "kv_heads"
            heads = [getattr(share, kind) for share in self.shares]
            num_heads = max(max(of_rank) for of_rank in heads) + 1
            features = Features.of(divide_by_heads(num_heads, 1, heads), self.rank, dim=-2)
            self.inputs[path] = self.outputs[path] = features
        for name, parameter in block.module.named_parameters(recurse=False):
            raise BlockError.unknown_parameter(f"{block.path}.{name}", tuple(parameter.shape))

    def divide_mlp(self, block: Mlp) -> None:
        size = cast("int", cast("Any", block.row.base).in_features)
        half = divide_evenly(size, self.num_ranks)
        divisions = (half, half) if len(block.columns) == 2 else (fuse(half, half),)
        for projection, division in zip(block.columns, divisions, strict=True):
            self.divide_columns(projection, division)
        self.divide_rows(block.row, half)
        self._note_activations(block, half)

    def divide_experts(self, block: Experts) -> None:
        module = cast("Any", block.module)
        half = divide_evenly(module.down_proj.shape[-1], self.num_ranks)
        if block.has_adapters:
            divide_whole_experts(block.path, module, half, self.shards.mesh)
        else:
            divide_experts(block.path, module, half, self.shards)
        self._note_activations(block, half)

    def _note_activations(self, block: Mlp | Experts, division: Division) -> None:
        for name, child in block.module.named_children():
            if not [*child.parameters()]:
                features = Features.of(division, self.rank)
                path = f"{block.path}.{name}"
                self.inputs[path] = self.outputs[path] = features

    def divide_columns(self, projection: Projection, division: Division) -> None:
        """Divide a projection and its adapters' B matrices by output features; A stays whole."""
        features = Features.of(division, self.rank)
        divide_columns(projection.base_path, projection.base, division, self.shards)
        self.outputs[projection.path] = self.outputs[projection.base_path] = features
        for adapter in projection.adapters:
            divide_columns(adapter.b_path, adapter.b, division, self.shards)
            self.outputs[adapter.b_path] = features

    def divide_rows(self, projection: Projection, division: Division) -> None:
        """Divide a projection and its adapters' A matrices by input features; B stays whole."""
        features = Features.of(division, self.rank)
        divide_rows(projection.base_path, projection.base, self.shards)
        self.inputs[projection.path] = self.inputs[projection.base_path] = features
        for adapter in projection.adapters:
            divide_rows(adapter.a_path, adapter.a, self.shards)
            self.inputs[adapter.a_path] = features
            self.inputs[adapter.dropout_path] = self.outputs[adapter.dropout_path] = features

    def divide_head(self, head: Projection) -> None:
        divide_columns_and_gather(head.base_path, head.base, self.shards)
        for adapter in head.adapters:
            divide_columns_and_gather(adapter.b_path, adapter.b, self.shards)


def _config_of(blocks: list[Block]) -> "PretrainedConfig":
    attention = next(block.module for block in blocks if isinstance(block, Attention))
    return cast("PretrainedConfig", attention.config)
