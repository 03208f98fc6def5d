from types import SimpleNamespace
from typing import Any

import torch

from assay.sites import CallSite
from assay.stages import Stage
from assay.training.replay.rank_scope import RankScope
from assay.training.replay.stage_values import ValueAddress
from assay.training.state.sharding import PartialSums

LAYER = "model.layers.0.mlp"


def calls(scope: RankScope, module: str, micro_batch: int) -> bool:
    return scope.is_own_call(CallSite(0, module, micro_batch=micro_batch))


def values(scope: RankScope, module: str, port: str, index: int = 0) -> bool:
    return scope.is_own_value(0, ValueAddress(Stage(module, "backward"), port, index))


def test_rank_answers_for_the_micro_batches_that_it_ran() -> None:
    scope = RankScope(micro_batches_run={(0, 1)})

    assert calls(scope, LAYER, 1)
    assert not calls(scope, LAYER, 0)
    assert values(scope, "", "labels", 1)
    assert not values(scope, "", "labels", 0)


def test_every_rank_answers_for_the_values_of_the_whole_step() -> None:
    scope = RankScope(micro_batches_run={(0, 1)})

    assert values(scope, LAYER, "gradient.weight")
    assert values(scope, "", "norm")


def test_stage_answers_for_the_modules_that_it_has_whole() -> None:
    scope = RankScope(
        modules=frozenset({"", "model", LAYER}),
        partial_modules=frozenset({"", "model"}),
        micro_batches_run={(0, 0)},
    )

    assert calls(scope, LAYER, 0)
    assert not calls(scope, "model.layers.1.mlp", 0)
    assert not calls(scope, "model", 0)
    assert values(scope, LAYER, "gradient.weight")
    assert not values(scope, "model.layers.1.mlp", "gradient.weight")
    assert values(scope, "", "norm")
    assert not values(scope, "", "loss")


def test_own_part_of_a_state_is_what_the_stage_has() -> None:
    whole = {
        "model": {f"{LAYER}.weight": 1, "lm_head.weight": 2},
        "moments": {f"{LAYER}.weight": {"exp_avg": 3}, "lm_head.weight": {"exp_avg": 4}},
        "generators": {"torch": 5},
    }
    scope = RankScope(modules=frozenset({LAYER}))

    assert scope.own_part(whole) == {
        "model": {f"{LAYER}.weight": 1},
        "moments": {f"{LAYER}.weight": {"exp_avg": 3}},
        "generators": {"torch": 5},
    }


def test_shares_of_a_sum_differ_and_add_up_to_it_exactly() -> None:
    def group(rank: int) -> Any:
        return SimpleNamespace(size=lambda: 3, rank=lambda: rank)

    total = torch.randn(5, 7).bfloat16().double()
    shares = [PartialSums(group(rank)).share(total, torch.bfloat16) for rank in range(3)]

    in_dtype = [share.bfloat16() for share in shares]
    assert torch.equal((in_dtype[0] + in_dtype[1] + in_dtype[2]).double(), total)
    assert all(not torch.equal(3 * share, total) for share in shares)
    assert all(bool(share.any()) for share in shares)


def test_shares_of_a_sum_are_distinguished_from_their_largest_and_from_a_mean_of_some() -> None:
    def group(rank: int) -> Any:
        return SimpleNamespace(size=lambda: 2, rank=lambda: rank)

    total = torch.randn(16, dtype=torch.float64)
    shares = torch.stack([PartialSums(group(rank)).share(total, torch.float32) for rank in (0, 1)])

    assert torch.equal(shares.sum(0), total)
    largest = shares.gather(0, shares.abs().argmax(0, keepdim=True))[0]
    mean_of_some = shares.sum(0) / (shares != 0).sum(0)
    for other in (largest, mean_of_some):
        assert int((other != total).sum()) >= 4
