"""Resizing the vocabulary of a model whose embedding and head are divided over ranks."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from assay.errors import UsageError
from assay.parallel.tensor_parallel.collectives import shard_tensor
from assay.parallel.tensor_parallel.division import check_every_rank_has_some, divide_evenly


class VocabularyError(UsageError):
    """A vocabulary that cannot be resized."""

    @classmethod
    def not_divided(cls, model: nn.Module) -> "VocabularyError":
        """Tensor parallelism has not been applied to `model`."""
        return cls(
            f"the embedding of {type(model).__name__} is not divided over tensor-parallel ranks; "
            "use its resize_token_embeddings"
        )

    @classmethod
    def loses_padding(cls, padding_idx: int, num_tokens: int) -> "VocabularyError":
        """The new vocabulary would be too small for the padding token."""
        return cls(f"a vocabulary of {num_tokens} tokens lacks the padding token {padding_idx}")


def resize_vocabulary(model: nn.Module, num_tokens: int) -> None:
    """Resize the embedding and the head of `model` to `num_tokens` rows, in place.

    Rows are added and removed at the end of the whole vocabulary: a token keeps its id and row,
    though maybe on another rank. A new row is the mean of the old ones, so that a new token is no
    more probable than an average one. Tied embeddings stay tied. Called before the optimizer is
    made, since the parameters are new ones.

    Raises: VocabularyError if the embedding is not divided or would lose its padding token;
        DivisionError if a rank would have no token.
    """
    embedding = cast("Any", model).get_input_embeddings()
    head = cast("Any", model).get_output_embeddings()
    if not isinstance(embedding.weight, DTensor):
        raise VocabularyError.not_divided(model)
    if embedding.padding_idx is not None and embedding.padding_idx >= num_tokens:
        raise VocabularyError.loses_padding(embedding.padding_idx, num_tokens)
    num_ranks = embedding.weight.device_mesh.size()
    check_every_rank_has_some("the vocabulary", divide_evenly(num_tokens, num_ranks))
    is_tied = head is not None and head.weight is embedding.weight
    embedding.weight = _resized(embedding.weight, num_tokens)
    embedding.num_embeddings = num_tokens
    if head is not None:
        head.weight = embedding.weight if is_tied else _resized(head.weight, num_tokens)
        head.out_features = num_tokens
        if head.bias is not None:
            head.bias = _resized(head.bias, num_tokens)
    _note_vocabulary_size(model, num_tokens)


def _resized(parameter: Tensor, num_rows: int) -> nn.Parameter:
    sharded = cast("DTensor", parameter.detach())
    old = sharded.full_tensor()
    num_new = max(0, num_rows - old.shape[0])
    wide = torch.promote_types(old.dtype, torch.float32)
    mean = old.mean(0, keepdim=True, dtype=wide).to(old.dtype)
    rows = torch.cat([old[:num_rows], mean.expand(num_new, *old.shape[1:])])
    (placement,) = sharded.placements
    dim = cast("Shard", placement).dim
    return nn.Parameter(shard_tensor(rows, sharded.device_mesh, dim), parameter.requires_grad)


def _note_vocabulary_size(model: nn.Module, num_tokens: int) -> None:
    """Set `vocab_size` in the configuration and in all modules that use it in their loss."""
    config = cast("Any", model).config
    config.get_text_config().vocab_size = num_tokens
    for module in model.modules():
        if isinstance(getattr(module, "vocab_size", None), int):
            cast("Any", module).vocab_size = num_tokens
