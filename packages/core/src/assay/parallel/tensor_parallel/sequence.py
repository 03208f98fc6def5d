"""Sequence parallelism: between the blocks, each tensor-parallel rank keeps some of the tokens.

Norms and residual sums then run on this rank's part of the sequence. Attention and MLP gather
their input, and what they return is summed over ranks and divided in one step.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from assay.errors import UsageError
from assay.parallel.tensor_parallel.collectives import gather, split
from assay.parallel.tensor_parallel.decoder_blocks import (
    Adapter,
    Block,
    BlockError,
    Experts,
    find_blocks,
)
from assay.parallel.tensor_parallel.layers import (
    RowParallelLinear,
    WithReplacedForward,
    WithSummedGradients,
    replace_forward_of,
)

# Hidden states are (batch, tokens, features).
_SEQUENCE = 1


class SequenceError(UsageError):
    """A sequence, or a model, that cannot be divided by its tokens."""

    @classmethod
    def uneven(cls, num_tokens: int, num_ranks: int) -> "SequenceError":
        """Ranks that would have different numbers of tokens."""
        return cls(
            f"a sequence of {num_tokens} tokens cannot be divided evenly over {num_ranks} "
            f"tensor-parallel ranks: {num_tokens} is no multiple of {num_ranks}"
        )

    @classmethod
    def not_divided(cls, path: str) -> "SequenceError":
        """Tensor parallelism was not applied before."""
        return cls(f"{path} is not divided over ranks; apply tensor parallelism first")


class SplitsSequence(WithReplacedForward):
    """Takes this rank's tokens of whole hidden states: the first decoder layer."""

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,  # noqa: ANN401 - of any module
        **kwargs: Any,  # noqa: ANN401 - of any module
    ) -> Any:  # noqa: ANN401 - of any module
        """The original forward, on some tokens."""
        num_tokens, num_ranks = hidden_states.shape[_SEQUENCE], self.mesh.size()
        if num_tokens % num_ranks:
            raise SequenceError.uneven(num_tokens, num_ranks)
        part = split(hidden_states, self.mesh, _SEQUENCE)
        return self.run_original(part, *args, **kwargs)


class GathersSequence(WithReplacedForward):
    """Needs all tokens of its input, and returns this rank's by itself: attention and MLP."""

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,  # noqa: ANN401 - of any module
        **kwargs: Any,  # noqa: ANN401 - of any module
    ) -> Any:  # noqa: ANN401 - of any module
        """The original forward, on all tokens."""
        return self.run_original(gather_tokens(hidden_states, self.mesh), *args, **kwargs)


class GathersAndSplitsSequence(WithReplacedForward):
    """Needs all tokens, and makes whole hidden states: a mixture of experts."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The original forward, on all tokens."""
        whole = self.run_original(gather_tokens(hidden_states, self.mesh))
        return split(whole, self.mesh, _SEQUENCE)


class NormThatGathers(WithSummedGradients):
    """Norms this rank's tokens and gathers them: the last norm."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """All tokens, normed."""
        return gather_tokens(super().forward(hidden_states), self.mesh)


def gather_tokens(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """All tokens, of which every rank has as many."""
    return gather(part, mesh, _SEQUENCE, part.shape[_SEQUENCE] * mesh.size())


def apply_sequence_parallel(model: nn.Module, mesh_tp: DeviceMesh) -> None:
    """Divide the tokens between the blocks of `model` over the ranks of `mesh_tp`, in place.

    `model` has gone through `apply_tensor_parallel` with the same mesh. Hidden states between the
    first decoder layer and the last norm are this rank's tokens, in order. Sequences have a
    multiple of as many tokens as there are ranks.

    Raises: SequenceError without tensor parallelism; BlockError for a layer with other parts than
        attention, MLP or experts, and norms.
    """
    blocks = find_blocks(model)
    by_layer: dict[str, dict[str, Block]] = {}
    for block in blocks:
        layer_path, name = _layer_and_child(block)
        by_layer.setdefault(layer_path, {})[name] = block
    for layer_path, of_layer in by_layer.items():
        for name, child in model.get_submodule(layer_path).named_children():
            _divide_child(f"{layer_path}.{name}", child, of_layer.get(name), mesh_tp)
    first_layer = next(iter(by_layer))
    replace_forward_of(model.get_submodule(first_layer), SplitsSequence, mesh_tp)
    decoder_path = first_layer.rpartition(".layers.")[0]
    last_norm = model.get_submodule(f"{decoder_path}.norm" if decoder_path else "norm")
    replace_forward_of(last_norm, NormThatGathers, mesh_tp)


def _layer_and_child(block: Block) -> tuple[str, str]:
    """Path of the decoder layer that `block` lies in, and the name of the layer's child there."""
    head, _, tail = block.path.rpartition("layers.")
    number, name, *_ = tail.split(".")
    return f"{head}layers.{number}", name


def _divide_child(path: str, child: nn.Module, block: Block | None, mesh: DeviceMesh) -> None:
    if block is None:
        for name, parameter in child.named_parameters():
            if parameter.dim() != 1:
                raise BlockError.unknown_parameter(f"{path}.{name}", tuple(parameter.shape))
        replace_forward_of(child, WithSummedGradients, mesh)
    elif isinstance(block, Experts) or block.path != path:
        replace_forward_of(child, GathersAndSplitsSequence, mesh)
    else:
        replace_forward_of(child, GathersSequence, mesh)
        _split_output(block.row.base_path, block.row.base)
        for adapter in block.row.adapters:
            _split_output_of_adapter(adapter, mesh)


def _split_output(path: str, linear: nn.Module) -> None:
    if not isinstance(linear, RowParallelLinear):
        raise SequenceError.not_divided(path)
    linear.output_placement = Shard(_SEQUENCE)


def _split_output_of_adapter(adapter: Adapter, mesh: DeviceMesh) -> None:
    """The A half makes this rank's tokens, so the whole B half meets only these."""
    _split_output(adapter.a_path, adapter.a)
    replace_forward_of(adapter.b, WithSummedGradients, mesh)
