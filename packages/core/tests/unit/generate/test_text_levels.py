"""The levels tokens, logits and sampler, and the addresses of what they find."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.devices.run_string import Run
from assay.generate.golden import GenerateEvidence
from assay.generate.spec import GenerateCheck
from assay.generate.text_levels import (
    FirstDifference,
    count_equal,
    first_differences,
    judge_logits_level,
    judge_sampler_level,
    judge_tokens_level,
    valid_tokens,
)
from assay.inputs import Batch
from assay.verdicts import Level, Outcome, TokenPosition

# Prompts 0 and 1 together, prompt 2 alone and in chunks of two; two new tokens each.
BATCHES = (
    Batch(0, ((1, 2), (3, 4, 5)), (0, 1), 0, 2),
    Batch(1, ((6, 7, 8, 9, 10),), (2,), 0, 2, prefill_chunk=2),
)
VOCABULARY = 50
CHECK = GenerateCheck(model="", candidate=Run("cpu", "bfloat16"))
MakeEvidence = Callable[..., Any]


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def logits_of_batches(seed: int, size: float = 1.0) -> dict[str, Tensor]:
    return {
        "0": size * random((2, 2, VOCABULARY), seed),
        "1": size * random((1, 2, VOCABULARY), seed + 1),
    }


@dataclass
class Results:
    """A candidate's trace, by name and batch."""

    stored: dict[str, dict[str, Tensor]]

    def attachment(self, name: str) -> dict[str, Tensor]:
        kind, _, batch = name.rpartition(".")
        return {"values": self.stored[kind][batch]}


@pytest.fixture
def make_evidence() -> MakeEvidence:
    """Evidence of a healthy candidate, but for what is given."""

    def make(
        *, can_generate: bool = True, sampling: dict[str, Any] | None = None, **actual: Any
    ) -> Any:
        expected = logits_of_batches(0, 3.0)
        tokens = {number: values.argmax(-1) for number, values in expected.items()}
        noise = logits_of_batches(10, 0.01)
        golden = {
            "logits": expected,
            "tokens": tokens,
            "scores": expected,
            "noise-logits": {n: expected[n] + noise[n] for n in expected},
        }
        error = logits_of_batches(20, 0.01)
        candidate = {
            "logits": {n: expected[n] + error[n] for n in expected},
            "tokens": dict(tokens),
            "scores": expected,
        } | actual
        manifest = SimpleNamespace(
            model=SimpleNamespace(can_generate=can_generate),
            inputs=SimpleNamespace(sampling=sampling or {}),
        )
        section: Any = SimpleNamespace(
            golden=manifest,
            dtype="bfloat16",
            outputs=("logits",),
            batches=BATCHES,
            tensors=lambda name: [golden[name][str(batch.number)] for batch in BATCHES],
        )
        results: Any = Results(candidate)
        report: Any = SimpleNamespace(problems={})
        return GenerateEvidence(CHECK, section, results, report)

    return make


def changed(
    evidence: Any, name: str, batch: str, change: Callable[[Tensor], None]
) -> dict[str, Tensor]:
    values = {number: value.clone() for number, value in evidence.candidate.stored[name].items()}
    change(values[batch])
    return values


# Logits


def test_tokens_behind_the_first_difference_are_not_counted_as_compared(
    make_evidence: MakeEvidence,
) -> None:
    tokens = {name: values.argmax(-1) for name, values in logits_of_batches(0, 3.0).items()}
    tokens["0"][1, 0] += 1

    result = judge_tokens_level(make_evidence(tokens=tokens), logits_agree=True)

    assert judge_tokens_level(make_evidence(), logits_agree=True).level.compared == 6
    assert result.level.compared == 5


@pytest.mark.parametrize("judge", [judge_logits_level, judge_sampler_level])
def test_level_tokens_judges_tokens_alone(make_evidence: MakeEvidence, judge: Any) -> None:
    level = judge(replace(make_evidence(), check=replace(CHECK, level="tokens"))).level

    assert (level.verdict, level.reason) == (None, "checked at level tokens")


def test_healthy_logits_pass_with_every_token_compared(make_evidence: MakeEvidence) -> None:
    result = judge_logits_level(make_evidence())

    assert (result.level.verdict, result.level.compared) == (Outcome.PASS, 6)
    assert result.first_bad is None
    facts = result.level.model_extra or {}
    assert facts["top1"] == 1.0
    assert 0 < facts["noise_ratio"] < facts["limit"]
    assert set(facts["resolution"]) == {
        "logits-error", "logits-worst", "logits-kl", "logits-kl-worst",
    }  # fmt: skip


def test_logits_of_another_vocabulary_fail(make_evidence: MakeEvidence) -> None:
    fewer = {n: value[..., :-3] for n, value in logits_of_batches(0).items()}

    level = judge_logits_level(make_evidence(logits=fewer)).level

    assert (level.verdict, level.compared) == (Outcome.FAIL, 0)
    assert level.reason == "logits of shape (2, 2, 47), the reference's have (2, 2, 50)"


@pytest.mark.parametrize("outcome", [Outcome.FAIL, Outcome.NOT_COMPARED])
@pytest.mark.parametrize(
    ("name", "judge"),
    [
        ("tokens", partial(judge_tokens_level, logits_agree=True)),
        ("logits", judge_logits_level),
        ("sampler", judge_sampler_level),
    ],
)
def test_level_without_output_has_the_outcome_and_the_words_of_its_problem(
    make_evidence: MakeEvidence, name: str, judge: Any, outcome: Outcome
) -> None:
    evidence = make_evidence(tokens={}, logits={}, scores={})
    evidence.report.problems[name] = Level(verdict=outcome, reason="no ids")

    level = judge(evidence).level

    assert (level.verdict, level.reason) == (outcome, "no ids")


def test_first_bad_token_is_the_earliest_position_of_any_prompt(
    make_evidence: MakeEvidence,
) -> None:
    def spoil(logits: Tensor) -> None:
        logits[0, 1] += 3 * random((VOCABULARY,), 5)  # prompt 0, position 3
        logits[1, 0] += 3 * random((VOCABULARY,), 6)  # prompt 1, position 3
        logits[1, 1] += 3 * random((VOCABULARY,), 7)

    evidence = make_evidence(logits=changed(make_evidence(), "logits", "0", spoil))
    result = judge_logits_level(evidence)

    assert result.level.verdict is Outcome.FAIL
    assert result.first_bad == TokenPosition(prompt=0, position=3, phase="decode")


def test_one_nan_fails_the_level_at_its_token(make_evidence: MakeEvidence) -> None:
    def spoil(logits: Tensor) -> None:
        logits[0, 1, 7] = math.nan

    evidence = make_evidence(logits=changed(make_evidence(), "logits", "1", spoil))
    result = judge_logits_level(evidence)

    assert result.level.verdict is Outcome.FAIL
    assert math.isnan((result.level.model_extra or {})["kl_mean"])
    assert result.first_bad == TokenPosition(prompt=2, position=6, phase="decode")


def test_measured_tokens_have_the_step_that_made_them(make_evidence: MakeEvidence) -> None:
    rows = judge_logits_level(make_evidence()).measurements

    kl = {(row.prompt, row.position): row.step for row in rows if row.statistic == "kl"}
    # The first logits come from the prefill (three chunks for prompt 2), the next from decoding.
    assert kl == {(0, 2): 0, (0, 3): 1, (1, 3): 0, (1, 4): 1, (2, 5): 2, (2, 6): 3}


# Tokens


def test_equal_tokens_pass(make_evidence: MakeEvidence) -> None:
    result = judge_tokens_level(make_evidence(), logits_agree=True)

    assert (result.level.verdict, result.level.compared) == (Outcome.PASS, 6)
    assert result.level.model_extra == {"equal": 6, "near_ties": 0}
    assert result.notes == []


def test_other_token_that_is_no_near_tie_fails_at_its_place(make_evidence: MakeEvidence) -> None:
    def spoil(tokens: Tensor) -> None:
        tokens[0, 1] = (tokens[0, 1] + 1) % VOCABULARY

    evidence = make_evidence(tokens=changed(make_evidence(), "tokens", "1", spoil))
    result = judge_tokens_level(evidence, logits_agree=True)

    assert result.level.verdict is Outcome.FAIL
    assert result.first_bad == TokenPosition(prompt=2, position=6, phase="decode")
    assert result.level.model_extra == {"equal": 5, "near_ties": 0}


def test_near_tie_passes_and_is_reported(make_evidence: MakeEvidence) -> None:
    evidence = make_evidence()
    first, second = evidence.expected("logits")[0][0, 1].topk(2).indices.tolist()
    for side in (*evidence.expected("logits")[:1], *evidence.expected("noise-logits")[:1]):
        side[0, 1, second] = side[0, 1, first] - 1e-4
    evidence.candidate.stored["tokens"]["0"] = evidence.expected("tokens")[0].clone()
    evidence.candidate.stored["tokens"]["0"][0, 1] = second

    result = judge_tokens_level(evidence, logits_agree=True)

    assert (result.level.verdict, result.first_bad) == (Outcome.PASS, None)
    assert result.level.model_extra == {"equal": 5, "near_ties": 1}
    assert result.notes[0].startswith("near-tie: 1 text chose a token")

    result = judge_tokens_level(evidence, logits_agree=False)

    assert (result.level.verdict, result.notes) == (Outcome.FAIL, [])
    assert result.level.model_extra == {"equal": 5, "near_ties": 0}


@pytest.mark.parametrize("length", [1, 3])
def test_texts_of_another_length_fail(make_evidence: MakeEvidence, length: int) -> None:
    other = {"0": torch.zeros(2, length), "1": torch.zeros(1, length)}

    result = judge_tokens_level(make_evidence(tokens=other), logits_agree=True)

    assert result.level.verdict is Outcome.FAIL
    assert result.level.reason == f"batch 0: (2, {length}) tokens instead of (2, 2)"


def test_drawn_tokens_are_not_compared(make_evidence: MakeEvidence) -> None:
    result = judge_tokens_level(make_evidence(sampling={"do_sample": True}), logits_agree=True)

    assert result.level.verdict is None
    assert "random" in (result.level.reason or "")


# Sampler


def test_equal_scores_pass(make_evidence: MakeEvidence) -> None:
    result = judge_sampler_level(make_evidence())

    assert (result.level.verdict, result.level.compared) == (Outcome.PASS, 6)


@pytest.mark.parametrize("value", [0.1, math.nan, -math.inf])
def test_one_other_score_fails(make_evidence: MakeEvidence, value: float) -> None:
    def spoil(scores: Tensor) -> None:
        scores[0, 0, 3] += value

    evidence = make_evidence(scores=changed(make_evidence(), "scores", "1", spoil))

    assert judge_sampler_level(evidence).level.verdict is Outcome.FAIL


# Models that generate nothing


def test_encoder_has_neither_tokens_nor_a_sampler(make_evidence: MakeEvidence) -> None:
    evidence = make_evidence(can_generate=False)

    assert judge_tokens_level(evidence, logits_agree=True).level.verdict is None
    assert judge_sampler_level(evidence).level.verdict is None


def test_encoder_is_compared_at_every_token_and_at_no_padding(make_evidence: MakeEvidence) -> None:
    expected = [random((2, 3, VOCABULARY), 1), random((1, 5, VOCABULARY), 2)]
    actual = {"0": expected[0].clone(), "1": expected[1].clone()}
    actual["0"][0, 0] = math.nan  # padding of prompt 0
    evidence = make_evidence(can_generate=False, logits=actual)
    evidence.section.tensors = lambda _name: expected

    result = judge_logits_level(evidence)

    assert (result.level.verdict, result.level.compared) == (Outcome.PASS, 2 + 3 + 5)
    rows = [row for row in result.measurements if row.statistic == "kl"]
    addresses = [(row.prompt, row.position) for row in rows]
    assert addresses[:5] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


# Addresses


@pytest.mark.parametrize(
    ("prompt", "position", "phase", "call"),
    [
        (0, 0, "prefill", (0, 0)),
        (0, 1, "prefill", (0, 0)),
        (0, 2, "decode", (0, 1)),
        (1, 3, "decode", (0, 1)),
        (2, 0, "prefill", (1, 0)),
        (2, 3, "prefill", (1, 1)),
        (2, 4, "prefill", (1, 2)),
        (2, 5, "decode", (1, 3)),
        (2, 6, "decode", (1, 4)),
    ],
)
def test_token_has_its_phase_and_the_call_that_it_entered(
    make_evidence: MakeEvidence, prompt: int, position: int, phase: str, call: tuple[int, int]
) -> None:
    evidence = make_evidence()
    token = evidence.token(prompt, position)

    assert token.phase == phase
    assert evidence.call_of(token) == call


# Two texts of three tokens over a vocabulary of four.
EXPECTED = torch.tensor([[1, 2, 3], [0, 1, 2]])
LOGITS = torch.zeros(2, 3, 4).scatter(2, EXPECTED[:, :, None], 1.0)
ALTERNATING = 0.01 * torch.tensor([1.0, -1.0, 1.0, -1.0])
NOISE = LOGITS + ALTERNATING
LIMIT = 6.0


def differences(
    actual: Tensor, logits: Tensor = LOGITS, noise: Tensor = NOISE
) -> list[FirstDifference]:
    return first_differences(actual, EXPECTED, logits, noise, LIMIT)


def with_token(row: int, step: int, token: int) -> Tensor:
    actual = EXPECTED.clone()
    actual[row, step] = token
    return actual


def test_equal_texts_have_no_difference() -> None:
    assert differences(EXPECTED.clone()) == []
    assert count_equal(EXPECTED, EXPECTED) == 6


def test_first_difference_of_each_text_is_reported_with_its_gap() -> None:
    actual = with_token(1, 1, 3)
    actual[1, 2] = 0  # follows from it

    (found,) = differences(actual)

    assert (found.row, found.step, found.expected, found.actual) == (1, 1, 1, 3)
    assert found.gap == 1.0
    # Every logit of the noise run is off by 0.01, in the worst case both of the pair.
    assert found.noise == pytest.approx(0.02, rel=1e-5)
    assert not found.is_near_tie


def test_gap_within_the_noise_is_a_near_tie() -> None:
    logits = LOGITS.clone()
    logits[0, 2, 0] = 0.89  # the chosen token has 1

    (found,) = differences(with_token(0, 2, 0), logits, logits + ALTERNATING)
    assert found.gap == pytest.approx(0.11)
    assert found.is_near_tie  # 6 times 0.02

    logits[0, 2, 0] = 0.87
    (found,) = differences(with_token(0, 2, 0), logits, logits + ALTERNATING)
    assert not found.is_near_tie


def test_token_that_the_reference_holds_unlikely_is_no_near_tie() -> None:
    logits = LOGITS.clone()
    logits[0, 0, 3] = -50.0

    (found,) = differences(with_token(0, 0, 3), logits, logits + ALTERNATING)

    assert found.gap == 51.0
    assert not found.is_near_tie


@pytest.mark.parametrize("side", ["reference", "noise run"])
def test_nan_decides_nothing(side: str) -> None:
    logits, noise = LOGITS.clone(), NOISE.clone()
    (logits if side == "reference" else noise)[0, 0] = math.nan

    (found,) = differences(with_token(0, 0, 3), logits, noise)

    assert not found.is_near_tie


def test_common_shift_of_all_logits_is_no_noise() -> None:
    (found,) = differences(with_token(0, 0, 3), noise=LOGITS + 5.0)

    assert found.noise == pytest.approx(0.0, abs=1e-6)
    assert not found.is_near_tie


def test_lucky_noise_at_a_token_is_at_least_the_usual_one() -> None:
    noise = NOISE.clone()
    noise[0, 0] = LOGITS[0, 0]

    (found,) = differences(with_token(0, 0, 3), noise=noise)

    # Five of six tokens are off by 0.01: the root mean square is 0.01 sqrt(5/6).
    assert found.noise == pytest.approx(2 * 0.01 * math.sqrt(5 / 6), rel=1e-4)


@pytest.mark.parametrize("shape", [(2, 2), (1, 3), (2, 4)])
def test_texts_of_other_lengths_are_not_zipped(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"tokens, expected \(2, 3\)"):
        differences(torch.zeros(shape, dtype=torch.long))


def test_texts_without_tokens_have_no_difference() -> None:
    none = torch.zeros(2, 0, dtype=torch.long)

    assert first_differences(none, none, LOGITS[:, :0], NOISE[:, :0], LIMIT) == []
    assert count_equal(none, none) == 0


def test_equal_tokens_are_counted_up_to_the_first_difference() -> None:
    actual = torch.tensor([[1, 0, 3], [3, 1, 2]])

    assert count_equal(actual, EXPECTED) == 1  # then 0 of the second text


@pytest.mark.parametrize(("gap", "near"), [(0.6, True), (0.61, False), (-0.1, True)])
def test_gap_at_the_limit_is_a_near_tie(gap: float, *, near: bool) -> None:
    difference = FirstDifference(0, 0, 1, 2, gap, 0.1, 6.0)

    assert difference.is_near_tie is near


def test_decoder_of_a_model_that_is_called_once_has_no_padding() -> None:
    section: Any = SimpleNamespace(
        golden=SimpleNamespace(model=SimpleNamespace(can_generate=False))
    )
    batch = Batch(0, ((1, 2, 3), (4,)), (0, 1), 0, 0, decoder_start=(5,))

    assert valid_tokens(section, batch, torch.zeros(2, 1, 6)).tolist() == [[True], [True]]
    plain = replace(batch, decoder_start=())
    assert valid_tokens(section, plain, torch.zeros(2, 3, 6)).sum() == 4
