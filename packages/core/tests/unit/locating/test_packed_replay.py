"""Micro-batches that are run as one are replayed against what was recorded of each."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from assay.comparing.results import ReplayResults
from assay.hooks.gradient_taps import GradientTaps
from assay.hooks.module_tracer import ModuleTracer
from assay.hooks.values.boundary import Boundary
from assay.hooks.values.exact_double import ExactDouble
from assay.locating.gradients import GradientReplayer
from assay.locating.matching.packed_trace import PackedBatch, PackedTrace, Segment
from assay.locating.modules import Replayer
from assay.recording.modules import GradientRecorder, Recorder
from assay.trace import Trace, TraceWriter

BOUNDARY = Boundary.exact_inputs_for(torch.float32)
IDS = torch.randint(1, 64, (3, 9), generator=torch.Generator().manual_seed(1))
# Two micro-batches: rows of 7 and 4 tokens, and one of 9.
LENGTHS = {0: (7, 4), 1: (9,)}
STACKED = PackedBatch(
    (Segment(0, 0, 7, 0, 0), Segment(0, 1, 4, 1, 0), Segment(1, 0, 9, 2, 0)), 3, 9
)
END_TO_END = PackedBatch(
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
        taps.handler.finish_backward()


@pytest.fixture(scope="module")
def recorded(llama: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "trace"
    yardstick = copy.deepcopy(llama).train().double()
    with TraceWriter(folder, {}) as writer, ExactDouble():
        for number in (0, 1):
            handler = GradientRecorder(writer, BOUNDARY)
            run(
                yardstick, GradientTaps(Recorder(writer, BOUNDARY), handler), number, *alone(number)
            )
    return folder


def replayed(
    llama: nn.Module, recorded: Path, packing: PackedBatch, batch: tuple[Inputs, Tensor]
) -> list[ReplayResults]:
    """Forward and backward of the packed batch, measured."""
    trace = PackedTrace(Trace.open(recorded))
    trace.pack(0, packing)
    forward, backward = Replayer(trace, BOUNDARY, "sdpa"), GradientReplayer(trace, BOUNDARY)
    run(copy.deepcopy(llama).train().float(), GradientTaps(forward, backward), 0, *batch)
    backward.results.flush()
    return [forward.finish(), backward.results]


def errors(results: list[ReplayResults]) -> dict[tuple[str, str], float]:
    """By module and port the relative error, or the share of what has to be equal."""
    found = {}
    for one in results:
        for key, port in one.ports.items():
            exact = port.exact.num_different / max(port.exact.num_compared, 1)
            found[key] = max(port.sums.relative_error if port.sums.num_elements else 0.0, exact)
    return found


@pytest.mark.parametrize(
    ("packing", "batch"), [(STACKED, stacked), (END_TO_END, end_to_end)], ids=["rows", "one row"]
)
def test_packed_micro_batches_agree_with_each_by_itself(
    llama: nn.Module,
    recorded: Path,
    packing: PackedBatch,
    batch: Callable[[], tuple[Inputs, Tensor]],
) -> None:
    results = replayed(llama, recorded, packing, batch())

    assert [one.unmatched_expected for one in results] == [[], []]
    found = errors(results)
    assert {key: error for key, error in found.items() if not error < 1e-5} == {}
    assert len(found) > 50


def test_rows_that_see_the_rows_before_them_are_found_in_the_mask(
    llama: nn.Module, recorded: Path
) -> None:
    found = errors(replayed(llama, recorded, END_TO_END, without_positions()))

    wrong = {key for key, error in found.items() if not error < 1e-5}
    assert ("model.layers.0", "input.attention_mask") in wrong
