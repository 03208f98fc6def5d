"""The passes that both sides of a check make."""

from pathlib import Path

import pytest
import torch

from assay.devices.registry import open_device
from assay.generate.passes.passes import (
    Side,
    Work,
    find_pointwise,
    record,
    replay,
    run_forced,
    run_free,
    single_rows,
    whole_batches,
)
from assay.hooks.usage import UsageWatch
from assay.hooks.values.boundary import Boundary
from assay.inputs import Batch
from assay.locating.matching.running_parts import BatchSource
from assay.locating.modules import Replayer
from assay.models import LoadedModel, load_model
from assay.recording.modules import Recorder
from assay.trace import Trace, TraceWriter

BOUNDARY = Boundary.exact_inputs_for(torch.float32)
TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.fixture(scope="session")
def yardstick() -> LoadedModel:
    return load_model(
        "micro:llama?trained=0", dtype="float64", attention="eager", rounded_to="float32"
    )


@pytest.fixture
def trace(yardstick: LoadedModel, batch: Batch, tmp_path: Path) -> Trace:
    with TraceWriter(tmp_path / "t", {}) as writer:
        side = Side(yardstick, open_device("cpu"))
        watch = UsageWatch(Recorder(writer, BOUNDARY))
        record(side, whole_batches([batch]), [TOKENS], watch)
    return Trace.open(tmp_path / "t")


def test_every_call_of_prefill_and_decoding_is_recorded(trace: Trace, batch: Batch) -> None:
    roots = [call for call in trace.calls if not call.site.module]

    assert [(call.site.step, call.site.micro_batch) for call in roots] == [
        (0, batch.number), (1, batch.number), (2, batch.number),
    ]  # fmt: skip
    rows = [call.rows for call in roots]
    assert rows[0] is not None
    assert rows[0].positions == ((-1, -1, 0, 1), (0, 1, 2, 3))
    assert rows[2] is not None
    assert rows[2].positions == ((3,), (5,))


def test_recorded_values_are_stored_in_double_for_a_float32_candidate(trace: Trace) -> None:
    call = next(call for call in trace.calls if call.site.module == "model.norm")

    stored = trace.tensor(call, "output")
    assert stored.dtype is torch.float64
    assert not torch.equal(stored, stored.float().double())


def test_yardstick_replayed_on_itself_is_exact_to_the_bit(
    trace: Trace, yardstick: LoadedModel, batch: Batch
) -> None:
    side = Side(yardstick, open_device("cpu"))

    results = replay(side, whole_batches([batch]), [TOKENS], Replayer(trace, BOUNDARY))

    assert len(results.ports) > 60
    assert {port.sums.dd for port in results.ports.values()} == {0.0}
    assert {port.exact.num_different for port in results.ports.values()} == {0}
    assert results.unmatched_expected == []


@pytest.mark.parametrize("works", ["whole batches", "single rows"])
def test_single_rows_are_matched_with_the_same_tensors_as_whole_batches(
    works: str, trace: Trace, side: Side, batch: Batch
) -> None:
    parts = whole_batches([batch]) if works == "whole batches" else single_rows([batch])
    tokens = [TOKENS] if works == "whole batches" else [TOKENS[:1], TOKENS[1:]]

    results = replay(side, parts, tokens, Replayer(trace, BOUNDARY))

    assert results.unmatched_expected == []
    down = results.ports["model.layers.1.mlp.down_proj", "output"].sums
    # 2 + 4 tokens of the prefill, two rows in two decode steps; 96 channels.
    assert down.num_elements == (6 + 4) * 96
    assert 0 < down.relative_error < 1e-6
    assert all(port.exact.num_different == 0 for port in results.ports.values())


def test_single_rows_keep_the_padding_of_their_batch(batch: Batch) -> None:
    first, second = single_rows([batch])

    assert first.batch.input_ids.tolist() == [[259, 259, 65, 66]]
    assert second.batch.input_ids.tolist() == [[67, 68, 69, 70]]
    assert (first.source, second.source) == (BatchSource(7, 0), BatchSource(7, 1))
    assert (first.batch.prompts, second.batch.prompts) == ((0,), (1,))


def test_free_and_forced_runs_agree(side: Side, batch: Batch) -> None:
    work = Work(batch, BatchSource(7))

    free = run_free(side, work, {})
    forced = run_forced(side, work, free.tokens)

    assert torch.equal(forced.tokens, free.tokens)
    assert torch.equal(forced.logits, free.logits)


def test_recording_changes_no_logits(side: Side, batch: Batch, tmp_path: Path) -> None:
    work = Work(batch, BatchSource(7))
    before = run_forced(side, work, TOKENS).logits
    with TraceWriter(tmp_path / "t", {}) as writer:
        record(side, [work], [TOKENS], UsageWatch(Recorder(writer, Boundary())))

    assert torch.equal(run_forced(side, work, TOKENS).logits, before)


def test_stages_that_only_round_are_activations_and_sums_of_two(side: Side, batch: Batch) -> None:
    pointwise = find_pointwise(side, Work(batch, BatchSource(7)))

    assert "model.layers.0.mlp.act_fn" in pointwise
    assert "model.layers.0.mlp" in pointwise
    assert "model.layers.0" in pointwise
    assert not {
        "model.layers.0.mlp.down_proj", "model.layers.0.self_attn", "model.norm", "lm_head",
    } & pointwise  # fmt: skip


def test_yardstick_runs_in_double_throughout(yardstick: LoadedModel, batch: Batch) -> None:
    side = Side(yardstick, open_device("cpu"))
    with side.running():
        assert torch.ones(1, dtype=torch.float64).float().dtype is torch.float64
    assert torch.ones(1, dtype=torch.float64).float().dtype is torch.float32

    logits = run_forced(side, Work(batch, BatchSource(7)), TOKENS).logits

    assert logits.unique().numel() > logits.float().unique().numel() * 0.9
