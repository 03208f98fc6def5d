"""Expert choices that differ at near ties."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from assay.comparison.check import CompareOptions, compare_dumps
from assay.comparison.measured_dumps import measure_noise
from assay.comparison.measuring.pair_measurer import expected_score_noise
from assay.comparison.pairing.port_series import Port
from assay.dumps.protocol import Dump
from assay.metrics import RowErrors
from assay.runs import SilentProgress
from assay.sites import Site
from assay.verdicts import Outcome, Verdict
from packages.core.tests.unit.comparison.memory_dump import make_dump

TOKENS, EXPERTS, WIDTH = 6, 4, 8
ROUTER = torch.randn(WIDTH, EXPERTS, generator=torch.Generator().manual_seed(3))
WEIGHTS = torch.randn(EXPERTS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(4))
# Two experts whose scores differ by less than rounding for the token TIED.
TIED = 2

Nudge = Callable[[Tensor], Tensor]


def dump(nudge: Nudge = lambda scores: scores, error: float = 0.0) -> Dump:
    """Return a dump of one layer. nudge: changes the scores before experts are chosen."""
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(5))
    scores = x @ ROUTER
    top = scores[TIED].topk(2).indices
    scores[TIED, top[1]] = scores[TIED, top[0]] - 1e-7
    scores = nudge(scores)
    chosen = scores.topk(1, dim=-1).indices
    result = torch.stack([x[n] @ WEIGHTS[chosen[n, 0]] for n in range(TOKENS)]) * (1 + error)
    ids = torch.arange(TOKENS).reshape(1, -1)
    return make_dump(
        {
            ("embed", "input.0", 0): ids,
            ("embed", "output", 0): x[None],
            ("layers.0.gate", "input.0", 0): x[None],
            ("layers.0.gate", "output.0", 0): scores,
            ("layers.0.gate", "output.1", 0): chosen,
            ("layers.0.experts", "input.0", 0): x[None],
            ("layers.0.experts", "output", 0): result[None],
        }
    )


def swap_tie(scores: Tensor) -> Tensor:
    """Round so that the other tied expert wins."""
    changed = scores.clone()
    top = scores[TIED].topk(2).indices
    changed[TIED, top] = scores[TIED, top.flip(0)]
    return changed


def prefer_expert_0(scores: Tensor) -> Tensor:
    return scores + torch.tensor([3.0, 0.0, 0.0, 0.0])


def judge(actual: Dump) -> Verdict:
    return compare_dumps(CompareOptions("", ""), dump(), actual, SilentProgress()).verdict


def test_a_near_tie_is_a_note() -> None:
    verdict = judge(dump(swap_tie))
    assert verdict.verdict is Outcome.PASS
    assert verdict.notes[0].startswith(
        "expert choices that differ at near ties: 1, first in layers.0.gate at prompt 0, position 2;"
    )


def on_two_ranks(one: Dump) -> Dump:
    """Return a dump of two ranks with equal values."""
    tensors = [
        replace(each, site=Site(replace(each.site.at, rank=rank), each.site.port))
        for each in one.tensors
        for rank in range(2)
    ]
    return replace(one, tensors=tensors)


def test_a_near_tie_on_every_rank_is_a_note() -> None:
    verdict = judge(on_two_ranks(dump(swap_tie)))
    assert verdict.verdict is Outcome.PASS, verdict.levels
    assert any("differ at near ties: 1, first in layers.0.gate" in one for one in verdict.notes)


def test_a_wrong_router_is_not_a_near_tie() -> None:
    verdict = judge(dump(prefer_expert_0))
    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert verdict.location.module == "layers.0.gate"


def test_a_wrong_expert_is_seen_next_to_a_near_tie() -> None:
    verdict = judge(dump(swap_tie, error=0.02))
    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert verdict.location.module == "layers.0.experts"


@pytest.mark.parametrize("nudge", [swap_tie, prefer_expert_0])
def test_the_same_dump_agrees_with_itself(nudge: Nudge) -> None:
    one = dump(nudge)
    assert compare_dumps(CompareOptions("", ""), one, one, SilentProgress()).verdict.passed


def test_noise_leaves_out_the_token_of_a_near_tie_and_no_later_one() -> None:
    options = CompareOptions("", "", noise="noise")
    scores = expected_score_noise(2.0**-24)
    noise = measure_noise(options, dump(), dump(swap_tie, error=1e-6), {}, scores)
    (result,) = noise.of(Port("layers.0.experts", "output"))
    positions = RowErrors.concatenate(result.sums.rows).position.tolist()
    assert positions == [0, 1, 3, 4, 5]
