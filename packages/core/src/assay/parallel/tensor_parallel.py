"""Tensor parallelism for Llama-type decoders of transformers, in place, with plain tensors at module boundaries.

Query, key, value, gate and up projections, fused or not, are sharded by their output features;
o_proj and down_proj by their input features; embedding and head by the vocabulary. Everything else,
including the hidden states between the blocks, is whole on every rank. LoRA may wrap any projection:
the matrices B are then sharded like outputs, and A like inputs.

A divided module gets another class; its path and parameter names stay. Sharded parameters become DTensors
in the order of the whole weight, so that `full_tensor()`, checkpoints and FSDP2 work as for any DTensor.
If a rank computes other features than its shard's (halves of fused weights, key/value heads that several
ranks need), the weight is gathered and cut in the forward pass, and the gradients of all ranks are summed
into the shards in the backward pass.

A *whole* tensor and its gradient are the same on all ranks; a *part* is this rank's shard along one dim;
the ranks' *summands* add up to the whole tensor.

Shapes: B batch, T tokens, H hidden features, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional

from assay.errors import UsageError
from assay.parallel.rank_boundaries import (
    Division,
    Features,
    HeadShare,
    TensorLayout,
    check_every_rank_has_some,
    divide_by_heads,
    divide_evenly,
    fuse,
    share_heads,
)


def sum_gradients(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return `whole`; sum the ranks' gradients in backward."""
    entered = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    return entered.to_local(grad_placements=[Partial()])


def sum_over_ranks(summand: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of all ranks' summands, whole on every rank."""
    entered = DTensor.from_local(summand, mesh, [Partial()], run_check=False)
    return entered.redistribute(placements=[Replicate()]).to_local()


def gather(part: Tensor, mesh: DeviceMesh, dim: int, size: int) -> Tensor:
    """Gather the whole tensor, of length `size` along `dim`, from all ranks' parts."""
    shape = list(part.shape)
    shape[dim] = size
    stride = torch.empty(shape, device="meta").stride()
    entered = DTensor.from_local(
        part.contiguous(),
        mesh,
        [Shard(dim % part.dim())],
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )
    return entered.redistribute(placements=[Replicate()]).to_local()


def shard_tensor(whole: Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    """Shard `whole`, which every rank has, along `dim`, and keep memory only for the part."""
    rank = mesh.get_local_rank()
    (chunk,) = divide_evenly(whole.shape[dim], mesh.size()).parts[rank]
    # A copy, as a view would keep the whole tensor's memory.
    part = (
        whole.detach()
        .narrow(dim, chunk.start, len(chunk))
        .clone(memory_format=torch.contiguous_format)
    )
    return DTensor.from_local(
        part,
        mesh,
        [Shard(dim)],
        run_check=False,
        shape=whole.shape,
        stride=torch.empty(whole.shape, device="meta").stride(),
    )


class ShardParameters:
    """The sharded parameters of one model; parameters shared by two modules stay shared."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def shard(self, module: nn.Module, name: str, dim: int) -> None:
        """Replace parameter `name` of `module` by a DTensor that is sharded along `dim`."""
        whole = cast("nn.Parameter", getattr(module, name))
        if id(whole) not in self._made:
            sharded = nn.Parameter(shard_tensor(whole, self.mesh, dim), whole.requires_grad)
            self._made[id(whole)] = (whole, sharded)  # kept, as ids are reused
        setattr(module, name, self._made[id(whole)][1])


def part_of(weight: Tensor, ranges: tuple[range, ...] | None, dim: int) -> Tensor:
    """Return the part of `weight` that this rank computes with.

    ranges: along `dim` of the gathered weight; None for the shard.
    """
    sharded = cast("DTensor", weight)
    if ranges is None:
        return sharded.to_local()
    whole = sharded.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return concatenate(whole, ranges, dim)


def concatenate(whole: Tensor, ranges: tuple[range, ...], dim: int) -> Tensor:
    """Concatenate the `ranges` of `whole` along `dim`."""
    return torch.cat([whole.narrow(dim, r.start, len(r)) for r in ranges], dim)


class ColumnParallelLinear(nn.Linear):
    """A linear with this rank's output features: whole input, local output.

    ranges: as in `part_of`.
    """

    mesh: DeviceMesh
    ranges: tuple[range, ...] | None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in nn.Linear
        """Compute this rank's output features."""
        weight = part_of(self.weight, self.ranges, 0)
        bias: Tensor | None = self.bias
        bias = None if bias is None else part_of(bias, self.ranges, 0)
        return functional.linear(sum_gradients(input, self.mesh), weight, bias)


class GatheredColumnParallelLinear(ColumnParallelLinear):
    """A linear with this rank's output features that gathers its output: whole input and output."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in nn.Linear
        """Compute the output features of all ranks."""
        # A copy, as FSDP2 warns of modules that return views.
        return gather(super().forward(input), self.mesh, -1, self.weight.shape[0]).clone()


class RowParallelLinear(nn.Linear):
    """A linear with this rank's input features: local input, whole output."""

    mesh: DeviceMesh

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in nn.Linear
        """Sum all ranks' products, and add the bias."""
        summand = functional.linear(input, part_of(self.weight, None, 1))
        bias: Tensor | None = self.bias
        output = sum_over_ranks(summand, self.mesh)
        return output if bias is None else output + bias.to(output.dtype)


class VocabularyParallelEmbedding(nn.Embedding):
    """An embedding with the rows of this rank's tokens: whole ids, whole output."""

    mesh: DeviceMesh

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in nn.Embedding
        """Look up the rows of all tokens; a rank has zeros for tokens of other ranks."""
        rank = self.mesh.get_local_rank()
        (tokens,) = divide_evenly(self.weight.shape[0], self.mesh.size()).parts[rank]
        elsewhere_BT = (input < tokens.start) | (input >= tokens.stop)
        local_ids_BT = (input - tokens.start).masked_fill(elsewhere_BT, 0)
        has_padding = self.padding_idx is not None and self.padding_idx in tokens
        rows_BTH = functional.embedding(
            local_ids_BT,
            part_of(self.weight, None, 0),
            cast("int", self.padding_idx) - tokens.start if has_padding else None,
        ).masked_fill(elsewhere_BT[..., None], 0)
        return sum_over_ranks(rows_BTH, self.mesh).clone()  # not a view, as above


_Module = TypeVar("_Module", bound=nn.Module)


class WithReplacedForward(nn.Module):
    """Base of modules that run the forward of their original class on other tensors."""

    mesh: DeviceMesh
    original: type[nn.Module]

    def forward_with(
        self,
        tensors: Mapping[str, Tensor],
        *args: Any,  # noqa: ANN401 - of any module
        **kwargs: Any,  # noqa: ANN401 - of any module
    ) -> Any:  # noqa: ANN401 - of any module
        """Call the original class's forward with `tensors` in place of parameters."""
        # On a shallow copy, so that hooks do not fire again.
        double = object.__new__(self.original)
        double.__dict__.update(self.__dict__)
        absent = {name: None for name, value in self._parameters.items() if value is None}
        double.__dict__.update(tensors, _parameters=absent)
        return cast("Any", double).forward(*args, **kwargs)


class WithSummedGradients(WithReplacedForward):
    """A norm of single heads, with whole parameters whose gradients are summed over the ranks."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Call the original forward on parameters whose gradients are summed."""
        entered = {
            name: sum_gradients(parameter, self.mesh)
            for name, parameter in self.named_parameters(recurse=False)
        }
        return cast("Tensor", self.forward_with(entered, hidden_states))


class ParallelExperts(WithReplacedForward):
    """Experts with this rank's intermediate features: whole input, whole output.

    The fused gate and up weight has shape (experts, 2 * intermediate, H), the down weight
    (experts, H, intermediate).
    """

    gate_up_ranges: tuple[range, ...] | None
    down_ranges: tuple[range, ...] | None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Sum all ranks' results."""
        gate_up, down = cast("Tensor", self.gate_up_proj), cast("Tensor", self.down_proj)
        summand = self.forward_with(
            {
                "gate_up_proj": self._part_of(gate_up, self.gate_up_ranges, 1),
                "down_proj": self._part_of(down, self.down_ranges, 2),
            },
            sum_gradients(hidden_states, self.mesh),
            top_k_index,
            sum_gradients(top_k_weights, self.mesh),
        )
        return sum_over_ranks(summand, self.mesh)

    def _part_of(self, weight: Tensor, ranges: tuple[range, ...] | None, dim: int) -> Tensor:
        if isinstance(weight, DTensor):
            return part_of(weight, ranges, dim)
        return concatenate(sum_gradients(weight, self.mesh), ranges or (), dim)


def divide_columns(
    path: str, linear: nn.Module, division: Division, shards: ShardParameters
) -> ColumnParallelLinear:
    """Make `linear`, in place, compute only the output features of this rank.

    Returns: `linear`.
    Raises: UsageError for another class, and for a rank without a feature.
    """
    plain = _plain(path, linear, nn.Linear)
    check_every_rank_has_some(path, division)
    shards.shard(plain, "weight", 0)
    if plain.bias is not None:
        shards.shard(plain, "bias", 0)
    divided = _become(ColumnParallelLinear, plain, shards.mesh)
    divided.ranges = _ranges_to_gather(division, shards.mesh)
    return divided


def divide_columns_and_gather(path: str, linear: nn.Module, shards: ShardParameters) -> None:
    """Divide the output features of `linear`, and gather them after each call.

    Raises: as `divide_columns`.
    """
    size = _plain(path, linear, nn.Linear).out_features
    divided = divide_columns(path, linear, divide_evenly(size, shards.mesh.size()), shards)
    _become(GatheredColumnParallelLinear, divided, shards.mesh)


def divide_rows(path: str, linear: nn.Module, shards: ShardParameters) -> RowParallelLinear:
    """Make `linear`, in place, compute with the input features of this rank, evenly divided.

    Raises: as `divide_columns`.
    """
    plain = _plain(path, linear, nn.Linear)
    check_every_rank_has_some(path, divide_evenly(plain.in_features, shards.mesh.size()))
    shards.shard(plain, "weight", 1)
    return _become(RowParallelLinear, plain, shards.mesh)


def divide_vocabulary(path: str, embedding: nn.Module, shards: ShardParameters) -> None:
    """Make `embedding` look up the tokens of this rank.

    Raises: as `divide_columns`.
    """
    plain = _plain(path, embedding, nn.Embedding)
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(plain, option):
            # It reads all rows, or makes sparse gradients.
            raise UsageError(
                f"{path}: an embedding with {option} cannot be divided by its vocabulary"
            )
    check_every_rank_has_some(path, divide_evenly(plain.num_embeddings, shards.mesh.size()))
    shards.shard(plain, "weight", 0)
    _become(VocabularyParallelEmbedding, plain, shards.mesh)


def divide_experts(path: str, experts: nn.Module, half: Division, shards: ShardParameters) -> None:
    """Make experts compute with the intermediate features of this rank, which are `half`.

    Experts that LoRA adapts keep whole parameters, as it adds whole matrices in each call.
    Raises: UsageError for a rank without a feature.
    """
    check_every_rank_has_some(path, half)
    gate_up, rank = fuse(half, half), shards.mesh.get_local_rank()
    gate_up_ranges, down_ranges = _ranges_to_gather(gate_up, shards.mesh), None
    if path.endswith(".base_layer"):
        gate_up_ranges, down_ranges = gate_up.parts[rank], half.parts[rank]
    else:
        shards.shard(experts, "gate_up_proj", 1)
        shards.shard(experts, "down_proj", 2)
    replaced = replace_forward_of(experts, ParallelExperts, shards.mesh)
    replaced.gate_up_ranges, replaced.down_ranges = gate_up_ranges, down_ranges


_Replaced = TypeVar("_Replaced", bound=WithReplacedForward)


def replace_forward_of(module: nn.Module, by: type[_Replaced], mesh: DeviceMesh) -> _Replaced:
    """Make `module` run the forward of `by`, which calls the original one.

    Raises: UsageError if its forward is already replaced.
    """
    original = type(module)
    if issubclass(original, WithReplacedForward):
        raise UsageError(f"a {type(module).__name__} is divided over ranks already")
    name = f"{by.__name__}{original.__name__}"
    return _become(type(name, (by, original), {"original": original}), module, mesh)


def _ranges_to_gather(division: Division, mesh: DeviceMesh) -> tuple[range, ...] | None:
    # The same on all ranks, as gathering is a collective.
    return None if division.is_even else division.parts[mesh.get_local_rank()]


def _become(layer: type[_Module], module: nn.Module, mesh: DeviceMesh) -> _Module:
    module.__class__ = layer
    cast("Any", module).mesh = mesh
    return cast("_Module", module)


def _plain(path: str, module: nn.Module, expected: type[_Module]) -> _Module:
    # A subclass may compute something else, and divided modules are subclasses.
    if type(module) is not expected:
        raise UsageError(
            f"{path} is a {type(module).__name__}; only a plain {expected.__name__} can be divided "
            "over tensor-parallel ranks"
        )
    return module


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
