"""What several micro-batches have, put together as one batch has it, and replayed."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from assay.hooks.gradient_taps import GradientTaps
from assay.hooks.module_tracer import ModuleTracer
from assay.hooks.suspension import ExactDouble
from assay.hooks.tensors import Boundary
from assay.judge.results import ReplayResults
from assay.recording.modules import Recorder
from assay.replay.gradients import GradientReplayer
from assay.replay.trace_views import (
    PackedBatch,
    PackedTrace,
    Recorded,
    Segment,
)
from assay.sites import Call, CallSite, RowMap
from assay.trace import Trace, TraceWriter

# Two micro-batches: rows of 3 and 2 tokens, and one of 4.
ROWS = {
    0: RowMap((0, 1), ((0, 1, 2), (0, 1, -1))),
    1: RowMap((2,), ((0, 1, 2, 3),)),
}
STACKED = PackedBatch(
    (Segment(0, 0, 3, 0, 0), Segment(0, 1, 2, 1, 0), Segment(1, 0, 4, 2, 0)), 3, 4
)
END_TO_END = PackedBatch(
    (Segment(1, 0, 4, 0, 0), Segment(0, 0, 3, 0, 4), Segment(0, 1, 2, 0, 7)), 1, 9
)

# One channel of tokens numbered by row; padding has 99.
TOKENS = {
    0: torch.tensor([[1.0, 2, 3], [11, 12, 99]])[..., None].expand(2, 3, 5),
    1: torch.tensor([[21.0, 22, 23, 24]])[..., None].expand(1, 4, 5),
}


def recorded(tensors: dict[int, Tensor], port: str = "output") -> Recorded:
    return Recorded(port, tensors, ROWS)


def test_rows_are_stacked_and_padded_with_zeros() -> None:
    packed = recorded(TOKENS).pack(STACKED)

    assert packed[..., 0].tolist() == [[1, 2, 3, 0], [11, 12, 0, 0], [21, 22, 23, 24]]
    assert packed.shape == (3, 4, 5)


def test_rows_are_laid_end_to_end_without_their_padding() -> None:
    packed = recorded(TOKENS).pack(END_TO_END)

    assert packed[..., 0].tolist() == [[21, 22, 23, 24, 1, 2, 3, 11, 12]]


def test_rows_and_tokens_in_one_dim_stay_in_one() -> None:
    flat = {number: tensor.flatten(0, 1) for number, tensor in TOKENS.items()}

    packed = recorded(flat).pack(STACKED)

    assert packed[:, 0].tolist() == [1, 2, 3, 0, 11, 12, 0, 0, 21, 22, 23, 24]


def test_heads_before_tokens_stay_before_them() -> None:
    heads = {n: tensor[:, None].expand(-1, 7, -1, -1) for n, tensor in TOKENS.items()}

    packed = recorded(heads).pack(END_TO_END)

    assert packed.shape == (1, 7, 9, 5)
    assert packed[0, 6, :, 4].tolist() == [21, 22, 23, 24, 1, 2, 3, 11, 12]


def test_what_all_rows_share_is_that_of_the_longest_or_begins_anew() -> None:
    positions = {0: torch.arange(3)[None], 1: torch.arange(4)[None]}

    assert recorded(positions).pack(STACKED).tolist() == [[0, 1, 2, 3]]
    assert recorded(positions).pack(END_TO_END).tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1]]


@pytest.mark.parametrize("port", ["input.attention_mask", "input.attention_mask.full_attention"])
def test_no_token_sees_one_of_another_row(port: str) -> None:
    masks = {
        n: torch.ones(size, size, dtype=torch.bool).tril()[None, None]
        for n, size in {0: 3, 1: 4}.items()
    }

    packed = recorded(masks, port).pack(END_TO_END)

    assert packed.shape == (1, 1, 9, 9)
    assert packed[0, 0, 6].nonzero()[:, 0].tolist() == [4, 5, 6]  # the third token of its row
    assert packed[0, 0, 7].nonzero()[:, 0].tolist() == [7]


def test_additive_mask_is_closed_by_the_lowest_number() -> None:
    masks = {n: torch.zeros(1, 1, size, size) for n, size in {0: 3, 1: 4}.items()}

    packed = recorded(masks, "input.attention_mask").pack(STACKED)

    assert packed.shape == (3, 1, 4, 4)
    assert packed[1, 0, 0].tolist() == [0, 0, *[torch.finfo(torch.float32).min] * 2]


@pytest.mark.parametrize(
    ("tensors", "roles"),
    [
        (TOKENS, ("rows", "tokens", None)),
        ({0: torch.zeros(2, 6), 1: torch.zeros(1, 6)}, ("rows", None)),
        ({0: torch.zeros(1, 3, 6), 1: torch.zeros(1, 4, 6)}, (None, "tokens", None)),
        ({0: torch.zeros(2, 3, 5), 1: torch.zeros(9, 5)}, None),
        ({0: torch.zeros(7), 1: torch.zeros(7)}, (None,)),
    ],
)
def test_dims_have_to_be_the_same_for_all_micro_batches(
    tensors: dict[int, Tensor], roles: tuple[str | None, ...] | None
) -> None:
    dims = recorded(tensors).find_dims(STACKED)

    assert (None if dims is None else dims.roles) == roles


def test_padding_masks_of_all_rows_are_laid_end_to_end() -> None:
    masks = {0: torch.tensor([[1, 1, 1], [1, 1, 0]]), 1: torch.tensor([[1, 1, 1, 1]])}

    packed = recorded(masks, "input.attention_mask").pack(STACKED)

    assert packed.tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]


@pytest.fixture
def trace(tmp_path: Path) -> PackedTrace:
    """Calls of `a` in two steps with two micro-batches each; the second step's have other values."""
    with TraceWriter(tmp_path / "trace", {}) as writer:
        for order, (step, number) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
            site = CallSite(step, "a", micro_batch=number)
            call = Call(site, "Linear", None, order, ports=("output",), rows=ROWS[number])
            writer.add(call, {"output": TOKENS[number] + 100 * step})
    return PackedTrace(Trace.open(tmp_path / "trace"))


def test_packed_micro_batches_are_found_as_one_and_others_as_they_are(trace: PackedTrace) -> None:
    trace.pack(0, STACKED)

    packed = trace.find(CallSite(0, "a"))
    assert packed is not None
    assert packed.rows == RowMap((0, 1, 2), ((0, 1, 2, -1), (0, 1, -1, -1), (0, 1, 2, 3)))
    assert trace.stored(packed, "output").shape == (3, 4, 5)
    assert trace.tensor(packed, "output")[1, :, 0].tolist() == [11, 12, 0, 0]
    assert [call.site.micro_batch for call in trace.calls] == [0, 0, 1]

    single = trace.find(CallSite(1, "a", micro_batch=1))
    assert single is not None
    assert trace.tensor(single, "output")[0, :, 0].tolist() == [121, 122, 123, 124]


def test_content_hash_is_of_all_parts(trace: PackedTrace) -> None:
    for step in (0, 1):
        trace.pack(step, STACKED)
    calls = [trace.find(CallSite(step, "a")) for step in (0, 1)]

    first, second = (trace.stored(call, "output").digest for call in calls if call is not None)
    assert first != second


def test_call_that_one_micro_batch_lacks_is_not_found(trace: PackedTrace) -> None:
    trace.pack(0, STACKED)

    assert trace.find(CallSite(0, "a", call=1)) is None


BOUNDARY = Boundary.exact_inputs_for(torch.float32)
IDS = torch.randint(1, 64, (3, 9), generator=torch.Generator().manual_seed(1))
# Two micro-batches: rows of 7 and 4 tokens, and one of 9.
LENGTHS = {0: (7, 4), 1: (9,)}
RUN_STACKED = PackedBatch(
    (Segment(0, 0, 7, 0, 0), Segment(0, 1, 4, 1, 0), Segment(1, 0, 9, 2, 0)), 3, 9
)
RUN_END_TO_END = PackedBatch(
    (Segment(0, 0, 7, 0, 0), Segment(0, 1, 4, 0, 7), Segment(1, 0, 9, 0, 11)), 1, 20
)

Inputs = Mapping[str, Tensor]


def rows_of(number: int) -> Tensor:
    return IDS[:2] if number == 0 else IDS[2:]


def alone(number: int) -> tuple[Inputs, Tensor]:
    """What a micro-batch is run with, and its labels."""
    length = max(LENGTHS[number])
    ids = rows_of(number)[:, :length]
    mask = torch.tensor([[1] * n + [0] * (length - n) for n in LENGTHS[number]])
    return {"input_ids": ids, "attention_mask": mask}, ids.masked_fill(mask == 0, -100)


def stacked() -> tuple[Inputs, Tensor]:
    mask = torch.tensor([[1] * n + [0] * (9 - n) for n in (7, 4, 9)])
    return {"input_ids": IDS * mask, "attention_mask": mask}, IDS.masked_fill(mask == 0, -100)


def end_to_end() -> tuple[Inputs, Tensor]:
    rows = [IDS[0, :7], IDS[1, :4], IDS[2]]
    labels = [torch.cat([torch.tensor([-100]), row[1:]]) for row in rows]
    positions = [torch.arange(len(row)) for row in rows]
    inputs = {"input_ids": torch.cat(rows)[None], "position_ids": torch.cat(positions)[None]}
    return inputs, torch.cat(labels)[None]


def without_positions() -> tuple[Inputs, Tensor]:
    """Each row sees the rows before it."""
    inputs, labels = end_to_end()
    return {"input_ids": inputs["input_ids"]}, labels


def run(model: Any, taps: GradientTaps, number: int, inputs: Inputs, labels: Tensor) -> None:
    tracer = ModuleTracer(taps)
    tracer.begin_batch(number, None)
    with tracer.attached(model):
        logits = model(**inputs, use_cache=False).logits
        loss = functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
        )
        taps.join(loss).backward()
        taps.finish_backward()


@pytest.fixture(scope="module")
def recorded_calls(llama: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "trace"
    yardstick = copy.deepcopy(llama).train().double()
    with TraceWriter(folder, {}) as writer, ExactDouble():
        for number in (0, 1):
            run(yardstick, GradientTaps(Recorder(writer, BOUNDARY)), number, *alone(number))
    return folder


def replayed(
    llama: nn.Module, recorded_calls: Path, packing: PackedBatch, batch: tuple[Inputs, Tensor]
) -> list[ReplayResults]:
    """Forward and backward of the packed batch, measured."""
    trace = PackedTrace(Trace.open(recorded_calls))
    trace.pack(0, packing)
    replayer = GradientReplayer(trace, BOUNDARY, "sdpa")
    run(copy.deepcopy(llama).train().float(), GradientTaps(replayer), 0, *batch)
    replayer.gradients.flush()
    return [replayer.finish(), replayer.gradients]


def errors(results: list[ReplayResults]) -> dict[tuple[str, str], float]:
    """By module and port the relative error, or the share of what has to be equal."""
    found = {}
    for one in results:
        for key, port in one.ports.items():
            exact = port.exact.num_different / max(port.exact.num_compared, 1)
            found[key] = max(port.sums.relative_error if port.sums.num_elements else 0.0, exact)
    return found


@pytest.mark.parametrize(
    ("packing", "batch"),
    [(RUN_STACKED, stacked), (RUN_END_TO_END, end_to_end)],
    ids=["rows", "one row"],
)
def test_packed_micro_batches_agree_with_each_by_itself(
    llama: nn.Module,
    recorded_calls: Path,
    packing: PackedBatch,
    batch: Callable[[], tuple[Inputs, Tensor]],
) -> None:
    results = replayed(llama, recorded_calls, packing, batch())

    assert [one.unmatched_expected for one in results] == [[], []]
    found = errors(results)
    assert {key: error for key, error in found.items() if not error < 1e-5} == {}
    assert len(found) > 50


def test_rows_that_see_the_rows_before_them_are_found_in_the_mask(
    llama: nn.Module, recorded_calls: Path
) -> None:
    found = errors(replayed(llama, recorded_calls, RUN_END_TO_END, without_positions()))

    wrong = {key for key, error in found.items() if not error < 1e-5}
    assert ("model.layers.0", "input.attention_mask") in wrong
