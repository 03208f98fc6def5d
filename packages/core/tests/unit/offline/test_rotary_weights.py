"""Weights whose heads are ordered for another form of rotary embedding."""

import pytest
import torch
from torch import Tensor

from assay.offline.check import CompareOptions, compare_dumps
from assay.runs import SilentProgress
from assay.verdicts import Outcome, Verdict
from packages.core.tests.unit.offline.memory_dump import make_dump

HEADS = {"q_proj": 4, "k_proj": 2, "v_proj": 2}
HEAD_DIM, WIDTH = 8, 32


def make_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"layers.{layer}.{name}": torch.randn(heads * HEAD_DIM, WIDTH, generator=generator)
        for layer in range(2)
        for name, heads in HEADS.items()
    }


def as_neighbors(weight: Tensor) -> Tensor:
    """Move channel i of the second half of each head behind channel i of the first half."""
    heads = weight.view(-1, 2, HEAD_DIM // 2, WIDTH)
    return heads.transpose(1, 2).reshape(weight.shape)


def reorder(weights: dict[str, Tensor], *kept: str) -> dict[str, Tensor]:
    """Reorder all queries and keys but those of the modules in `kept`."""
    return {
        name: as_neighbors(one) if name[-6] in "qk" and name not in kept else one.clone()
        for name, one in weights.items()
    }


def judge(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> Verdict:
    one, other = (
        make_dump({(name, "parameter.weight", 0): value for name, value in side.items()})
        for side in (expected, actual)
    )
    return compare_dumps(CompareOptions("e", "a"), one, other, SilentProgress()).verdict


def test_heads_in_the_other_order_are_a_doubt_in_either_direction() -> None:
    weights = make_weights()
    for sides in ((weights, reorder(weights)), (reorder(weights), weights)):
        verdict = judge(*sides)

        assert verdict.verdict is Outcome.NOT_COMPARED
        assert verdict.levels["weights"].verdict is Outcome.PASS
        reason = verdict.levels["completeness"].reason or ""
        assert reason.startswith("weights alone do not show which order of channels")
        assert any("rotary embedding" in note for note in verdict.notes)


@pytest.mark.parametrize("module", ["layers.1.q_proj", "layers.0.k_proj", "layers.0.v_proj"])
def test_a_wrong_row_among_reordered_heads_is_named(module: str) -> None:
    wrong = reorder(make_weights())
    wrong[module][5] *= 1.1
    verdict = judge(make_weights(), wrong)

    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert verdict.location.module == module


@pytest.mark.parametrize("kept", ["layers.0.k_proj", "layers.1.q_proj"])
def test_queries_and_keys_of_different_orders_fail(kept: str) -> None:
    verdict = judge(make_weights(), reorder(make_weights(), kept))

    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert (verdict.location.module or "").startswith(kept[:8])


def test_reordered_values_are_wrong() -> None:
    weights = make_weights()
    wrong = weights | {"layers.0.v_proj": as_neighbors(weights["layers.0.v_proj"])}

    assert judge(weights, wrong).verdict is Outcome.FAIL
