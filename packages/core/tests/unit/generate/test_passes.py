"""The passes that both sides of a check make, and the scores on the reference's own logits."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from assay.devices.registry import open_device
from assay.generate.generation_loop import OutputError
from assay.generate.passes import (
    Side,
    Work,
    find_pointwise,
    processed_scores,
    read_choice_noise,
    record,
    replay,
    run_forced,
    run_free,
    single_rows,
    whole_batches,
)
from assay.generate.text_levels import SCORE_TOLERANCE, compare_scores
from assay.hooks.coverage_watch import UsageWatch
from assay.hooks.tensors import Boundary
from assay.inputs import Batch, Media
from assay.models import LoadedModel, load_model
from assay.recording.modules import Recorder
from assay.replay.modules import Replayer
from assay.replay.ports import BatchSource
from assay.replay.routing import ScoreNoise
from assay.trace import Trace, TraceError, TraceWriter

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


def test_single_row_has_its_own_image() -> None:
    media = tuple((Media("pixel_values", (1, 1, 2, 2), seed),) for seed in (5, 6))
    batch = Batch(0, ((), ()), (0, 1), 0, 0, media=media)

    assert [work.batch.media for work in single_rows([batch])] == [media[:1], media[1:]]


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


LOGITS = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0])


@pytest.fixture
def work(batch: Batch) -> Work:
    return Work(batch, BatchSource(batch.number))


def scores_of(side: Side, work: Work, **sampling: float) -> Tensor:
    """Scores of the first five ids; all others have very low logits."""
    logits = torch.full((2, 3, side.loaded.vocab_size), -1000.0)
    logits[..., :5] = LOGITS
    tokens = torch.tensor([[0, 1, 2], [2, 1, 0]])
    return processed_scores(side, work, tokens, logits, {"do_sample": True, **sampling})


def test_generation_loop_that_never_asks_for_scores_has_none(
    side: Side, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side.loaded.model, "generate", lambda *_, **__: None, raising=False)

    with pytest.raises(OutputError, match="does not call its argument custom_generate"):
        scores_of(side, work)


def test_temperature_divides_the_logits(side: Side, work: Work) -> None:
    scores = scores_of(side, work, temperature=0.5, top_k=0)

    assert torch.equal(scores[..., :5], (LOGITS / 0.5).expand(2, 3, 5))


def test_top_k_excludes_all_others(side: Side, work: Work) -> None:
    scores = scores_of(side, work, top_k=2)

    assert scores[0, 0, :5].tolist() == [4.0, 3.0, -math.inf, -math.inf, -math.inf]


def test_top_p_keeps_the_smallest_set_of_that_mass(side: Side, work: Work) -> None:
    # Probabilities: 0.64, 0.23, 0.09, ...: the first two hold 0.87, three 0.95.
    scores = scores_of(side, work, top_p=0.9, top_k=0)

    assert scores[0, 0, :5].tolist() == [4.0, 3.0, 2.0, -math.inf, -math.inf]


def test_repetition_penalty_sees_the_tokens_before_each_step(side: Side, work: Work) -> None:
    scores = scores_of(side, work, repetition_penalty=2.0, top_k=0)

    # Row 0 continues with 0, 1, 2: at step 1 token 0 was seen, at step 2 tokens 0 and 1.
    assert scores[0, :, 0].tolist() == [4.0, 2.0, 2.0]
    assert scores[0, :, 1].tolist() == [3.0, 3.0, 1.5]


def test_greedy_decoding_leaves_the_logits_but_for_the_end_of_the_text(
    side: Side, work: Work
) -> None:
    logits = torch.randn(2, 3, side.loaded.vocab_size, generator=torch.Generator().manual_seed(0))

    scores = processed_scores(side, work, torch.zeros(2, 3, dtype=torch.long), logits, {})

    eos = list(side.loaded.eos_token_ids)
    assert bool(scores[..., eos].isneginf().all())
    scores[..., eos] = logits[..., eos]
    assert torch.equal(scores, logits)


def score(*values: float) -> Tensor:
    return torch.tensor([[values]])


def test_noise_of_expert_scores_without_a_number_is_refused(tmp_path: Path) -> None:
    for name, noise in (("whole", {"scores": 0.5, "groups": 0.0}), ("older", {"scores": 0.5})):
        with TraceWriter(tmp_path / name, {}) as writer:
            writer.attach_json("choice-noise", {"mlp": noise})

    assert read_choice_noise(Trace.open(tmp_path / "whole")) == {"mlp": ScoreNoise(0.5, 0.0)}
    with pytest.raises(
        TraceError, match="older: mlp lacks groups, unlike in this version of assay"
    ):
        read_choice_noise(Trace.open(tmp_path / "older"))


def test_equal_scores_agree() -> None:
    difference = compare_scores(score(4, 3, -math.inf), score(4, 3, -math.inf))

    assert (difference.num_tokens, difference.num_masked_differently) == (1, 0)
    assert difference.largest == 0.0
    assert difference.agrees


def test_difference_is_measured_against_the_largest_score_of_the_token() -> None:
    difference = compare_scores(score(4, 3.5), score(4, 3))

    assert difference.largest == 0.125
    assert not difference.agrees


@pytest.mark.parametrize(("factor", "agrees"), [(0.9, True), (1.1, False)])
def test_few_roundings_are_allowed(factor: float, *, agrees: bool) -> None:
    expected = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    actual = expected + factor * SCORE_TOLERANCE * torch.tensor([0.0, 1.0], dtype=torch.float64)

    assert compare_scores(actual, expected).agrees is agrees


@pytest.mark.parametrize("excluded", ["more", "fewer", "others"])
def test_other_excluded_ids_disagree(excluded: str) -> None:
    actual = {
        "more": score(4, -math.inf, -math.inf),
        "fewer": score(4, 3, 2),
        "others": score(4, -math.inf, 2),
    }[excluded]

    difference = compare_scores(actual, score(4, 3, -math.inf))

    assert difference.num_masked_differently == (2 if excluded == "others" else 1)
    assert not difference.agrees


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_score_that_is_not_finite_disagrees(value: float) -> None:
    assert not compare_scores(score(4, value), score(4, 3)).agrees


def test_scores_that_exclude_everything_on_both_sides_agree() -> None:
    nothing = score(-math.inf, -math.inf)

    assert compare_scores(nothing, nothing).agrees


def test_all_zero_scores_agree_and_any_other_number_does_not() -> None:
    assert compare_scores(score(0, 0), score(0, 0)).agrees
    assert not compare_scores(score(0, 1e-20), score(0, 0)).agrees
