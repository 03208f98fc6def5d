"""Embedding and head that are divided by the vocabulary, and their resize."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from assay.devices.base import Device
from assay.parallel.tensor_parallel import embedding as embedding_room
from assay.parallel.tensor_parallel import layers
from assay.parallel.tensor_parallel.collectives import shard_tensor
from assay.parallel.tensor_parallel.decoder import apply_tensor_parallel
from assay.parallel.tensor_parallel.division import DivisionError
from assay.parallel.tensor_parallel.embedding import VocabularyError, resize_vocabulary
from assay.parallel.tensor_parallel.layers import (
    LayerError,
    ShardParameters,
    divide_columns_and_gather,
    divide_vocabulary,
)
from packages.core.tests.subsystem.parallel.judging import differing, plain
from packages.core.tests.subsystem.parallel.tiny_models import VOCABULARY, build_model
from packages.core.tests.subsystem.parallel.training_runs import (
    differing_after_training,
    train_whole,
)

# 11 rows on 3 ranks: 4, 4 and 3.
NUM_TOKENS, HIDDEN = 11, 6
PADDING = 5

Results = dict[str, Tensor]


class TiedPair(nn.Module):
    """Looks tokens up and gives each the logits of the same rows."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, HIDDEN, padding_idx=PADDING)
        self.head = nn.Linear(HIDDEN, NUM_TOKENS)
        for parameter in self.parameters():
            with torch.no_grad():
                parameter.copy_(draw(*parameter.shape))
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows: Tensor = self.embedding(ids)
        return rows, self.head(rows)


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).bfloat16().float()


def run(pair: TiedPair, dtype: torch.dtype, device: str) -> Results:
    # Each token at least once, on boundaries of the ranks and in other orders; padding twice.
    ids = torch.tensor([[0, 10, 3, 4, 7, 8, PADDING], [9, 6, PADDING, 1, 2, 4, 4]], device=device)
    rows, logits = pair(ids)
    ((rows * draw(*rows.shape).to(device, dtype)).sum()
     + (logits * draw(*logits.shape).to(device, dtype)).sum()).backward()  # fmt: skip
    gradients = {name: p.grad for name, p in pair.named_parameters()}
    results = {"rows": plain(rows), "logits": plain(logits)}
    return results | {name: plain(g) for name, g in gradients.items() if g is not None}


def compare(
    mesh: DeviceMesh, device: Device, dtype_name: str, *, is_tied: bool, fault: str | None = None
) -> list[str]:
    dtype: torch.dtype = getattr(torch, dtype_name)
    where = device.torch_device
    exact = run(TiedPair(is_tied=is_tied).double(), torch.float64, "cpu")
    noise = run(TiedPair(is_tied=is_tied).to(where, dtype), dtype, where)
    pair = TiedPair(is_tied=is_tied).to(where, dtype)
    shards = ShardParameters(mesh["tp"])
    divide_vocabulary("embedding", pair.embedding, shards)
    divide_columns_and_gather("head", pair.head, shards)
    assert (pair.head.weight is pair.embedding.weight) == is_tied
    if fault:
        setattr(layers, *FAULTS[fault])
    return differing(run(pair, dtype, where), noise, exact)


@pytest.mark.world(tp=3)
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_divided_vocabulary_gives_the_rows_logits_and_gradients_of_the_whole_one(
    mesh: DeviceMesh, device: Device, dtype: str, is_tied: bool
) -> None:
    assert compare(mesh, device, dtype, is_tied=is_tied) == []


FAULTS: dict[str, tuple[str, Callable[..., object]]] = {
    "rows of other ranks are left out": ("sum_over_ranks", lambda summand, _: summand),
    "the head's input gets no sum": ("sum_gradients", lambda whole, _: whole),
}


@pytest.mark.world(tp=3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("rows of other ranks are left out", "rows"),
        ("the head's input gets no sum", "embedding.weight"),
    ],
)
def test_broken_vocabulary_is_found(
    mesh: DeviceMesh, device: Device, dtype: str, fault: str, found: str
) -> None:
    assert found in compare(mesh, device, dtype, is_tied=False, fault=fault)


@pytest.mark.world(tp=2)
def test_embeddings_with_options_for_all_rows_are_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(LayerError) as caught:
        divide_vocabulary("tok", nn.Embedding(4, 2, max_norm=1.0), ShardParameters(mesh["tp"]))
    assert str(caught.value) == (
        "tok: an embedding with max_norm cannot be divided by its vocabulary"
    )


@pytest.mark.world(tp=4)
def test_rank_without_a_token_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(DivisionError, match=r"tok: 9 features over 4 .* leave none for rank 3"):
        divide_vocabulary("tok", nn.Embedding(9, 2), ShardParameters(mesh["tp"]))


def resize_as_one_process(model: Any, num_tokens: int) -> None:
    """What a resize means, on whole weights: rows stay at their ids, new ones are the mean."""
    tied = model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")
    for path in ("model.embed_tokens", "lm_head"):
        module = model.get_submodule(path)
        old = module.get_parameter("weight").detach()
        mean = old.mean(0, keepdim=True).expand(max(0, num_tokens - len(old)), -1)
        module.weight = nn.Parameter(torch.cat([old[:num_tokens], mean]))
    model.config.vocab_size = model.vocab_size = num_tokens
    if tied:
        model.get_submodule("lm_head").weight = model.get_parameter("model.embed_tokens.weight")


def rows_appended_on_each_rank(old: Any, num_rows: int) -> nn.Parameter:
    """The mistake of resizing each rank's rows: global token ids shift."""
    sharded = old.detach()
    parts = [*sharded.full_tensor().chunk(sharded.device_mesh.size())]
    num_new = (num_rows - old.shape[0]) // len(parts)
    rows = [row for part in parts for row in (part, part.mean(0, keepdim=True).expand(num_new, -1))]
    return nn.Parameter(shard_tensor(torch.cat(rows), sharded.device_mesh, 0))


def compare_resized(
    mesh: DeviceMesh, device: Device, architecture: str, num_tokens: int
) -> list[str]:
    def build_resized() -> nn.Module:
        model = build_model(architecture)
        resize_as_one_process(model, num_tokens)
        return model

    def divide(model: nn.Module) -> None:
        apply_tensor_parallel(model, mesh["tp"])
        resize_vocabulary(model, num_tokens)

    oracle = train_whole(build_resized, device.torch_device)
    model = build_model(architecture)
    return differing_after_training(oracle, model, device.torch_device, divide)


# 67 rows on 2 ranks are 34 and 33; the batches have tokens below 64.
@pytest.mark.world(tp=2)
@pytest.mark.parametrize("num_tokens", [67, 72])
@pytest.mark.parametrize("architecture", ["granite", "llama"], ids=["tied", "untied"])
def test_resized_vocabulary_keeps_its_tokens(
    mesh: DeviceMesh, device: Device, architecture: str, num_tokens: int
) -> None:
    assert compare_resized(mesh, device, architecture, num_tokens) == []


@pytest.mark.world(tp=2)
def test_rows_that_each_rank_appends_are_found(mesh: DeviceMesh, device: Device) -> None:
    setattr(embedding_room, "_resized", rows_appended_on_each_rank)  # noqa: B010 - mypy
    found = compare_resized(mesh, device, "llama", 72)
    assert {"loss 0", "gradient 0 model.embed_tokens.weight"} <= {*found}


@pytest.mark.world(tp=2)
@pytest.mark.parametrize("num_tokens", [9, 64, 101])
def test_rows_and_ids_stay_through_growing_and_shrinking(mesh: DeviceMesh, num_tokens: int) -> None:
    model: Any = build_model("granite")
    before = model.get_parameter("model.embed_tokens.weight").detach().clone()
    apply_tensor_parallel(model, mesh["tp"])
    resize_vocabulary(model, num_tokens)
    after = plain(model.get_parameter("model.embed_tokens.weight"))
    kept = min(num_tokens, VOCABULARY)
    assert after.shape == (num_tokens, 32)
    assert after[:kept].equal(before[:kept])
    torch.testing.assert_close(after[kept:], before.mean(0).expand(num_tokens - kept, -1))
    embedding = model.get_submodule("model.embed_tokens")
    assert model.get_parameter("lm_head.weight") is embedding.weight
    sizes = (embedding.num_embeddings, model.get_submodule("lm_head").out_features)
    assert (*sizes, model.config.vocab_size, model.vocab_size) == (num_tokens,) * 4


@pytest.mark.world(tp=2)
def test_impossible_resize_is_refused(mesh: DeviceMesh) -> None:
    model = build_model("llama", pad_token_id=40)
    with pytest.raises(VocabularyError) as caught:
        resize_vocabulary(model, 70)
    assert str(caught.value) == (
        "the embedding of LlamaForCausalLM is not divided over tensor-parallel ranks; use its "
        "resize_token_embeddings"
    )
    apply_tensor_parallel(model, mesh["tp"])
    with pytest.raises(VocabularyError) as caught:
        resize_vocabulary(model, 40)
    assert str(caught.value) == "a vocabulary of 40 tokens lacks the padding token 40"
    with pytest.raises(DivisionError, match=r"the vocabulary: 1 features over 2 .* rank 1"):
        resize_vocabulary(build_divided(mesh), 1)


def build_divided(mesh: DeviceMesh) -> nn.Module:
    model = build_model("llama")
    apply_tensor_parallel(model, mesh["tp"])
    return model
