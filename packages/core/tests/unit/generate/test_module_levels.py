"""Rows of single tokens, and the one head of an attention that is wrong."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.generate.module_levels import _token_rows, describe_wrong_head
from assay.judge import token_rows
from assay.judge.replays import FailedStage, Judged
from assay.judge.results import PortResult, ReplayResults
from assay.metrics import PairSums, RowErrors
from assay.stages import Stage
from assay.verdicts import Measurement, Ratio, TokenPosition


class FakeEvidence:
    """Prompts of two tokens each; a step for every token after them."""

    unit_roundoff = 2.0**-8

    def token(self, prompt: int, position: int) -> TokenPosition:
        phase: Any = "prefill" if position < 2 else "decode"
        return TokenPosition(prompt=prompt, position=position, phase=phase)

    def call_of(self, token: TokenPosition) -> tuple[int, int]:
        return 0, max(0, token.position - 1)


def port(module: str, name: str, stage: str, *rows: tuple[int, int, float]) -> PortResult:
    """rows: prompt, position, relative error."""
    prompt, position, error = zip(*rows, strict=True)
    one = torch.ones(len(rows), dtype=torch.float64)
    errors = RowErrors(
        torch.tensor(prompt), torch.tensor(position), torch.tensor(error).double(), one, one
    )
    return PortResult(module, name, Stage(stage), 3, "bfloat16", "", sums=PairSums(rows=[errors]))


def rows_of(ports: list[PortResult], noise: list[PortResult]) -> list[Measurement]:
    evidence: Any = FakeEvidence()
    return _token_rows(
        {(one.module, one.port): one for one in ports},
        ReplayResults({(one.module, one.port): one for one in noise}),
        evidence,
    )


def test_each_token_has_a_row_in_the_order_of_prompt_and_position() -> None:
    actual = port("a", "output", "a", (1, 0, 0.5), (0, 2, 0.25), (0, 1, 0.125))
    noise = port("a", "output", "a", (0, 1, 0.125), (1, 0, 0.25), (0, 2, 0.25))

    rows = rows_of([actual], [noise])

    assert [(row.prompt, row.position, row.step) for row in rows] == [
        (0, 1, 0), (0, 2, 1), (1, 0, 0)
    ]  # fmt: skip
    assert [row.ratio for row in rows] == [1.0, 1.0, 2.0]
    assert {(row.level, row.module, row.port, row.order) for row in rows} == {
        ("modules", "a", "output", 3)
    }


def test_row_of_a_stage_is_that_of_its_worst_port() -> None:
    own = port("a", "output", "a", (0, 0, 0.5), (0, 1, 0.25))
    handed = port("a.child", "input.x", "a", (0, 0, 0.25), (0, 1, 0.5))
    noise = [
        port("a", "output", "a", (0, 0, 0.25), (0, 1, 0.25)),
        port("a.child", "input.x", "a", (0, 0, 0.25), (0, 1, 0.125)),
    ]

    first, second = rows_of([own, handed], noise)

    assert (first.port, first.ratio) == ("output", 2.0)
    assert (second.port, second.ratio, second.actual, second.expected) == (
        "a.child:input.x", 4.0, 0.5, 0.125
    )  # fmt: skip


def test_rows_of_one_token_count_by_the_worst() -> None:
    # The heads of an attention.
    heads = port("a", "output", "a", (0, 0, 0.125), (0, 0, 0.5), (0, 0, 0.25))

    (row,) = rows_of([heads], [heads])

    assert (row.actual, row.expected, row.ratio) == (0.5, 0.5, 1.0)


def test_nan_is_the_worst_of_a_token_and_of_a_stage() -> None:
    nan = port("a", "output", "a", (0, 0, 0.1), (0, 0, math.nan), (0, 0, 0.2))
    number = port("a.child", "input.x", "a", (0, 0, 0.5))

    for ports in ([nan, number], [number, nan]):
        (row,) = rows_of(ports, [])
        assert row.port == "output"
        assert math.isnan(row.ratio)


def test_lucky_noise_has_the_floor_of_half_a_unit() -> None:
    actual = port("a", "output", "a", (0, 0, 2.0**-8))

    (alone,) = rows_of([actual], [])
    (lucky,) = rows_of([actual], [port("a", "output", "a", (0, 0, 0.0))])

    assert (alone.ratio, lucky.ratio) == (2.0, 2.0)
    assert alone.expected == 0.0


def test_rows_that_belong_to_no_token_are_left_out() -> None:
    assert rows_of([port("a", "output", "a", (-1, -1, 0.5), (-1, 3, 0.5))], []) == []


@pytest.mark.parametrize("position", [0, 1 << 20])
def test_long_positions_stay_what_they_are(position: int) -> None:
    (row,) = rows_of([port("a", "output", "a", (7, position, 0.5))], [])

    assert (row.prompt, row.position) == (7, position)


def test_first_of_equally_wrong_ports_is_shown_and_nan_is_the_worst() -> None:
    ports = [
        port("a", "output.0", "a", (0, 0, 0.5), (0, 1, math.inf)),
        port("a", "output.1", "a", (0, 0, 0.5), (0, 1, math.nan)),
    ]

    rows = rows_of(ports, [port("a", one.port, "a", (0, 0, 0.25), (0, 1, 0.25)) for one in ports])

    assert [(row.position, row.port) for row in rows] == [(0, "output.0"), (1, "output.1")]
    assert rows[0].ratio == 2.0
    assert math.isnan(rows[1].ratio)


@pytest.mark.parametrize("num_values", [1, 4, 1 << 15])
def test_rows_do_not_depend_on_how_many_stages_are_searched_together(
    monkeypatch: pytest.MonkeyPatch, num_values: int
) -> None:
    monkeypatch.setattr(token_rows, "_BLOCK_VALUES", num_values)
    ports = [port(name, "output", name, (0, 0, 0.5), (0, 1, 0.25)) for name in "abc"]

    rows = rows_of(ports, [port(one.module, "output", one.module, (0, 0, 0.25)) for one in ports])

    # The token without noise is divided by the smallest noise, half a unit roundoff.
    expected = [(name, at, ratio) for name in "abc" for at, ratio in ((0, 2.0), (1, 0.25 * 2**9))]
    assert [(row.module, row.position, row.ratio) for row in rows] == expected


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
