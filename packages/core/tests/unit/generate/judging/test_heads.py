"""Naming the one head of an attention that is wrong."""

import math

import pytest
import torch
from torch import Tensor

from assay.comparing.judge import FailedStage, Judged
from assay.comparing.results import ReplayResults
from assay.generate.judging.module_levels import describe_wrong_head
from assay.stages import Stage
from assay.verdicts import Ratio

ATTENTION = "layers.1.self_attn"
WIDTH, NUM_HEADS, NUM_TOKENS = 8, 4, 64


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


OUTPUT = random(NUM_TOKENS, NUM_HEADS * WIDTH, seed=0)
ROUNDED = OUTPUT + 0.01 * random(NUM_TOKENS, NUM_HEADS * WIDTH, seed=1)


def results(output: Tensor, *, caches: bool = True) -> ReplayResults:
    """What a replay measured of an attention that hands `output` to its projection."""
    found = ReplayResults()
    numbers = torch.arange(NUM_TOKENS)
    stage = Stage(ATTENTION)
    port = found.at(f"{ATTENTION}.o_proj", "input.input", stage, "bfloat16", "")
    port.sums.add(output, OUTPUT, numbers, numbers)
    if caches:
        port = found.at(ATTENTION, "changed.past_key_values.1.keys", stage, "bfloat16", "")
        keys = random(NUM_TOKENS, WIDTH, seed=2)
        port.sums.add(keys, keys, numbers, numbers)
    return found


def wrong_heads(*numbers: int) -> Tensor:
    output = ROUNDED.clone()
    for number in numbers:
        output[:, number * WIDTH : (number + 1) * WIDTH] *= 1.1
    return output


def describe(candidate: ReplayResults) -> str | None:
    port = candidate.ports[f"{ATTENTION}.o_proj", "input.input"]
    judged = Judged.of(Ratio("replay-tensor", 1.0, 0.1), 3.0, port)
    origin = FailedStage(Stage(ATTENTION), judged, math.inf, 0)
    return describe_wrong_head(origin, candidate, results(ROUNDED))


def test_wrong_head_is_named() -> None:
    assert describe(results(wrong_heads(2))) == f"the error of {ATTENTION} is in head 2 of 4"


@pytest.mark.parametrize("numbers", [(), (1, 3), (0, 1, 2, 3)])
def test_no_head_is_named_where_it_is_not_one(numbers: tuple[int, ...]) -> None:
    assert describe(results(wrong_heads(*numbers))) is None


def test_no_head_is_named_where_their_width_is_unknown() -> None:
    assert describe(results(wrong_heads(2), caches=False)) is None
