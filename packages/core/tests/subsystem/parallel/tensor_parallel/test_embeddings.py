"""Embedding and head that are divided by the vocabulary."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from assay.devices.base import Device
from assay.errors import UsageError
from assay.parallel import tensor_parallel
from assay.parallel.tensor_parallel import (
    ShardParameters,
    divide_columns_and_gather,
    divide_vocabulary,
)
from packages.core.tests.subsystem.parallel.judging import differing, plain

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
        setattr(tensor_parallel, *FAULTS[fault])
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
    with pytest.raises(UsageError) as caught:
        divide_vocabulary("tok", nn.Embedding(4, 2, max_norm=1.0), ShardParameters(mesh["tp"]))
    assert str(caught.value) == (
        "tok: an embedding with max_norm cannot be divided by its vocabulary"
    )


@pytest.mark.world(tp=4)
def test_rank_without_a_token_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(UsageError, match=r"tok: 9 features over 4 .* leave none for rank 3"):
        divide_vocabulary("tok", nn.Embedding(9, 2), ShardParameters(mesh["tp"]))
