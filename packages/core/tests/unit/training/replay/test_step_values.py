from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from assay.sites import CallSite
from assay.stages import Stage
from assay.trace import Trace, TraceWriter
from assay.training.replay import step_values
from assay.training.replay.step_values import (
    RankScope,
    RunRows,
    StepValues,
    StepWriter,
    ValueAddress,
    count_rows,
)
from assay.training.state.parameters import PartialSums


def test_rows_of_a_run_are_numbered_one_after_the_other() -> None:
    batches = [[{"input_ids": torch.zeros(count, 5)} for count in step] for step in ([2, 3], [1])]
    rows = RunRows.of_batches(batches)

    assert count_rows(batches) == [[2, 3], [1]]
    assert rows.of_micro_batch(0, 0, 2) == (0, 1)
    assert rows.of_micro_batch(0, 1, 3) == (2, 3, 4)
    assert rows.of_micro_batch(1, 0, 1) == (5,)
    assert [rows.step_of(row) for row in range(6)] == [0, 0, 0, 0, 0, 1]


def test_rows_of_many_micro_batches_have_numbers_of_their_own() -> None:
    rows = RunRows.of_counts([[2] * 1500] * 3)

    numbers = [
        (row, step)
        for step in range(3)
        for micro_batch in range(1500)
        for row in rows.of_micro_batch(step, micro_batch, 2)
    ]

    assert [row for row, _ in numbers] == list(range(3 * 1500 * 2))
    assert [step for _, step in numbers] == [rows.step_of(row) for row, _ in numbers]


@pytest.mark.parametrize(
    ("micro_batch", "count", "numbers"), [(1, 3, (2, 3, -1)), (1, 1, (2,)), (2, 2, (-1, -1))]
)
def test_rows_that_are_not_planned_have_no_number(
    micro_batch: int, count: int, numbers: tuple[int, ...]
) -> None:
    assert RunRows.of_counts([[2, 2]]).of_micro_batch(0, micro_batch, count) == numbers


@pytest.mark.parametrize("part_bytes", [1, 1 << 20])
def test_values_of_a_step_are_read_back_as_they_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr(step_values, "_PART_BYTES", part_bytes)
    made = ValueAddress(Stage("a|b", "backward"), "gradient.weight", kind="Linear")
    left = ValueAddress(Stage("a|b", "reduce"), "gradient.weight")
    loss = ValueAddress(Stage("", "forward"), "loss", 1)
    tensors = {made: torch.ones(2), loss: torch.zeros(1, 1)}
    states = {"generator.0": torch.tensor([7]), "generator.1": torch.tensor([8])}
    with TraceWriter(tmp_path / "trace", {}) as writer:
        step = StepWriter(writer, 3)
        for address, value in tensors.items():
            step.store(address, value)
        step.scale(left, made, 1)
        for name, state in states.items():
            step.store_state(name, state)
        step.finish()

    read = StepValues.read(Trace.open(tmp_path / "trace"), 3)

    assert read.addresses == (made, loss, left)
    assert read.scaled == {left: (made, 1)}
    assert all(torch.equal(read.stored[address], value) for address, value in tensors.items())
    assert all(torch.equal(read.states[name], state) for name, state in states.items())


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
