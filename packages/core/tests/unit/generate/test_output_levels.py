"""The level outputs: rows of tokens and of texts, and the order of embeddings."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.devices.run_string import Run
from assay.generate.golden import GenerateEvidence
from assay.generate.output_levels import (
    compare_output,
    judge_outputs_level,
    output_ratios,
    rank_agreement,
)
from assay.generate.spec import GenerateCheck
from assay.inputs import Batch
from assay.verdicts import Level, Outcome, TokenPosition

# Two prompts of 2 and 3 tokens together, the shorter one padded on the left, then one of 5.
BATCHES = (
    Batch(0, ((1, 2), (3, 4, 5)), (0, 1), 0, 0),
    Batch(1, ((6, 7, 8, 9, 10),), (2,), 0, 0),
)
WIDTH = 32
CHECK = GenerateCheck(model="", candidate=Run("cpu", "bfloat16"), level="logits")


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def of_tokens(seed: int, *rest: int) -> list[Tensor]:
    return [random((len(batch.rows), batch.length, *rest), seed) for batch in BATCHES]


def of_texts(seed: int, *rest: int) -> list[Tensor]:
    return [random((len(batch.rows), *rest), seed) for batch in BATCHES]


def test_hidden_states_have_a_row_for_each_token_but_padding() -> None:
    expected = of_tokens(0, WIDTH)
    actual = [value.clone() for value in expected]
    actual[0][0, 0] += 100  # the padding of prompt 0
    actual[0][0, 2] *= 1.5  # its second token

    rows = compare_output(BATCHES, actual, expected)

    addresses = list(zip(rows.errors.prompt.tolist(), rows.errors.position.tolist(), strict=True))
    assert addresses == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), *((2, at) for at in range(5))]
    assert rows.errors.relative().tolist() == pytest.approx([0, 0.5, *[0] * 8], abs=1e-6)


@pytest.mark.parametrize("rest", [(3,), ()])
def test_scores_of_texts_have_a_row_for_each_text(rest: tuple[int, ...]) -> None:
    expected = of_texts(0, *rest)
    actual = [value.clone() for value in expected]
    actual[1] *= 2

    rows = compare_output(BATCHES, actual, expected)

    assert rows.errors.relative().tolist() == pytest.approx([0, 0, 1])
    assert rows.errors.position.tolist() == [-1, -1, -1]


def test_scores_of_positions_are_compared_at_tokens_only() -> None:
    expected = of_tokens(0)  # (B, T): the start of an answer
    actual = [value.clone() for value in expected]
    actual[0][0, 0] += 100  # padding

    rows = compare_output(BATCHES, actual, expected)

    assert rows.errors.relative().tolist() == [0, 0, 0]


def test_as_many_scores_as_tokens_are_not_taken_for_positions() -> None:
    """All batches have 3 positions and 3 classes: padding hides no score."""
    batches = (Batch(0, ((1, 2), (3, 4, 5)), (0, 1), 0, 0), Batch(1, ((6, 7, 8),), (2,), 0, 0))
    expected = [torch.ones(2, 3), torch.ones(1, 3)]
    actual = [torch.ones(2, 3), torch.ones(1, 3)]
    actual[0][0, 0] = 100

    rows = compare_output(batches, actual, expected)

    assert rows.errors.relative()[0] > 10


def test_infinities_of_both_sides_are_equal_and_one_of_one_side_or_a_nan_is_not() -> None:
    expected = of_texts(0, 3)
    expected[0][0, 0] = -math.inf
    actual = [value.clone() for value in expected]

    rows = compare_output(BATCHES, actual, expected)
    assert rows.errors.error.tolist() == [0, 0, 0]

    actual[0][0, 0] = 0.0
    rows = compare_output(BATCHES, actual, expected)
    assert rows.errors.error.tolist() == [math.inf, 0, 0]

    actual[0][0, 0] = -math.inf
    actual[1][0, 0] = math.nan
    rows = compare_output(BATCHES, actual, expected)
    assert rows.errors.error.isnan().tolist() == [False, False, True]


def test_few_rows_allow_for_chance_and_many_hardly() -> None:
    """Three rows: exp(3.7 / sqrt(3)) = 8.47 times the noise."""
    expected = of_texts(0, 2)
    noise = [1.01 * value for value in expected]
    rows = compare_output(BATCHES, noise, expected)

    (ratio,) = output_ratios(rows, rows, 2**-8)

    assert ratio.statistic == "output-error"
    assert ratio.actual == pytest.approx(0.01, rel=1e-4)
    assert ratio.expected == pytest.approx(0.01 * math.exp(3.7 / math.sqrt(3)), rel=1e-4)


def test_worst_row_is_judged_where_rows_are_long() -> None:
    expected = of_tokens(0, WIDTH)
    rows = compare_output(BATCHES, [1.02 * value for value in expected], expected)

    assert [one.statistic for one in output_ratios(rows, rows, 2**-8)] == [
        "output-error",
        "output-worst",
    ]


def test_rank_agreement_counts_the_nearer_neighbors_that_stay() -> None:
    """Angles 0, 10, 30 and 100 degrees; then the second text moves past the third, to 40."""

    def texts(*degrees: float) -> Tensor:
        angle = torch.tensor(degrees, dtype=torch.float64).deg2rad()
        return torch.stack([angle.cos(), angle.sin()], 1)

    expected = texts(0, 10, 30, 100)

    assert rank_agreement(expected, expected) == 1
    # Of 12 triples, those of text 0 (10 and 30), of 10 (0 and 30) and of 100 (10 and 30) change.
    assert rank_agreement(texts(0, 40, 30, 100), expected) == pytest.approx(9 / 12)
    assert rank_agreement(expected[:2], expected[:2]) is None


@pytest.fixture
def make_evidence() -> Callable[..., Any]:
    """Evidence of a candidate with `actual` hidden states (B, T, C) and a healthy noise run."""

    def make(
        actual: list[Tensor],
        problems: dict[str, Level] | None = None,
        of_noise: list[Tensor] | None = None,
        keypoints: list[Tensor] | None = None,
    ) -> Any:
        expected = of_tokens(0, WIDTH)
        stored = {
            "output-last_hidden_state": expected,
            "noise-output-last_hidden_state": of_noise
            or [
                value + 0.004 * noise
                for value, noise in zip(expected, of_tokens(1, WIDTH), strict=True)
            ],
        }
        if keypoints is not None:
            found = [value[:, :2] for value in keypoints]
            stored = {"output-keypoints": found, "noise-output-keypoints": keypoints} | stored
        actual_of: dict[str, Any] = {
            "output-last_hidden_state": actual,
            "output-keypoints": keypoints,
        }
        section: Any = SimpleNamespace(
            dtype="bfloat16",
            batches=BATCHES,
            outputs=tuple(name for name in stored if name.startswith("output-")),
            tensors=lambda name: stored[name],
        )
        trace: Any = SimpleNamespace(
            attachment=lambda name: {
                "values": actual_of[name.rpartition(".")[0]][int(name.rpartition(".")[2])]
            }
        )
        report: Any = SimpleNamespace(problems=problems or {})
        return GenerateEvidence(CHECK, section, trace, report)

    return make


def healthy() -> list[Tensor]:
    return [
        value + 0.004 * noise
        for value, noise in zip(of_tokens(0, WIDTH), of_tokens(2, WIDTH), strict=True)
    ]


def test_healthy_outputs_pass_with_every_token_compared(make_evidence: Callable[..., Any]) -> None:
    result = judge_outputs_level(make_evidence(healthy()))

    assert result is not None
    assert (result.level.verdict, result.level.compared) == (Outcome.PASS, 10)
    facts = (result.level.model_extra or {})["outputs"]["last_hidden_state"]
    assert facts["cosine"] == pytest.approx(1, abs=1e-4)
    assert facts["rank_agreement"] == 1


def test_one_wrong_token_fails_at_its_position(make_evidence: Callable[..., Any]) -> None:
    actual = healthy()
    actual[1][0, 3] += 0.3 * random((WIDTH,), 5)

    result = judge_outputs_level(make_evidence(actual))

    assert result is not None
    assert result.level.verdict is Outcome.FAIL
    assert result.first_bad == TokenPosition(prompt=2, position=3, phase="prefill")


def test_other_shape_fails_with_both_shapes(make_evidence: Callable[..., Any]) -> None:
    result = judge_outputs_level(make_evidence([value[:, :-1] for value in healthy()]))

    assert result is not None
    assert (result.level.verdict, result.level.reason) == (
        Outcome.FAIL,
        "last_hidden_state of shape (2, 2, 32), the reference's has (2, 3, 32)",
    )


@pytest.mark.parametrize("kept", [2, 3])
def test_rows_that_rounding_chooses_are_not_compared(
    make_evidence: Callable[..., Any], kept: int
) -> None:
    of_noise = [value[:, :-1] for value in healthy()]

    result = judge_outputs_level(
        make_evidence([value[:, :kept] for value in healthy()], of_noise=of_noise)
    )

    assert result is not None
    assert (result.level.verdict, result.level.reason) == (
        Outcome.NOT_COMPARED,
        "rounding changes the shape of last_hidden_state: (2, 2, 32) and (2, 3, 32)",
    )


def test_another_width_fails_although_rounding_chooses_the_rows(
    make_evidence: Callable[..., Any],
) -> None:
    of_noise = [value[:, :-1] for value in healthy()]

    result = judge_outputs_level(
        make_evidence([value[:, :-1, :-1] for value in healthy()], of_noise=of_noise)
    )

    assert result is not None
    assert (result.level.verdict, result.level.reason) == (
        Outcome.FAIL,
        "last_hidden_state of shape (2, 2, 31), the reference's has (2, 3, 32)",
    )


@pytest.mark.parametrize(("wrong", "outcome"), [(0.3, Outcome.FAIL), (0, Outcome.NOT_COMPARED)])
def test_other_outputs_are_judged_beside_one_whose_rows_rounding_chooses(
    make_evidence: Callable[..., Any], wrong: float, outcome: Outcome
) -> None:
    actual = healthy()
    actual[1][0, 3] += wrong * random((WIDTH,), 5)

    result = judge_outputs_level(make_evidence(actual, keypoints=healthy()))

    assert result is not None
    assert (result.level.verdict, result.level.compared) == (outcome, 10)
    (reason,) = result.notes or [str(result.level.reason)]
    assert reason.startswith("rounding changes the shape of keypoints: (2, 3, 32) and")


def test_model_that_raised_has_no_compared_outputs(make_evidence: Callable[..., Any]) -> None:
    problem = Level(verdict=Outcome.NOT_COMPARED, reason="the model raised")

    result = judge_outputs_level(make_evidence(healthy(), {"logits": problem}))

    assert result is not None
    assert result.level == problem
