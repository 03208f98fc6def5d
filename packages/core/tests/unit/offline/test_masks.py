"""Attention masks of two implementations: one boolean, one additive."""

import pytest
import torch
from torch import Tensor

from assay.offline.check import CompareOptions, compare_dumps
from assay.runs import SilentProgress
from assay.verdicts import Outcome
from packages.core.tests.unit.offline.memory_dump import make_dump

CAUSAL = torch.ones(2, 1, 4, 4, dtype=torch.bool).tril()


def additive(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("port", ["input.attention_mask", "input.1"])
@pytest.mark.parametrize(
    ("mask", "outcome"), [(CAUSAL, Outcome.PASS), (torch.ones_like(CAUSAL), Outcome.FAIL)]
)
def test_masks_are_compared_by_what_they_allow(port: str, mask: Tensor, outcome: Outcome) -> None:
    torch.manual_seed(0)
    states = torch.randn(2, 4, 8)
    ids = torch.arange(8).reshape(2, 4)

    def dump_with(value: Tensor) -> dict[tuple[str, str, int], Tensor]:
        return {
            ("embed", "input.0", 0): ids, ("attn", "input.0", 0): states, ("attn", port, 0): value,
            ("attn", "output", 0): 2 * states,
        }  # fmt: skip

    expected, actual = make_dump(dump_with(CAUSAL)), make_dump(dump_with(additive(mask)))
    verdict = compare_dumps(CompareOptions("e", "a"), expected, actual, SilentProgress()).verdict
    assert verdict.verdict is outcome, verdict.levels
