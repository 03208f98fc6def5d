"""What a failure without a place is called, and which of several ranks decides."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.devices.run_string import Run
from assay.generate.golden import GenerateEvidence
from assay.generate.judging import Judgement, judge_generation, merge_weight_facts, worst_of_ranks
from assay.generate.spec import CandidateReport, GenerateCheck
from assay.inputs import Batch
from assay.judge.coverage import Usage
from assay.models.inspect.report import LoadReport, SetupChanges
from assay.verdicts import Location, Measurement, Outcome, TokenPosition, Verdict

BATCH = Batch(0, ((1, 2), (3, 4, 5)), (0, 1), 0, 4)
NOISE = 0.01


def random(seed: int) -> Tensor:
    return torch.randn(2, 4, 50, generator=torch.Generator().manual_seed(seed))


EXPECTED = 3 * random(0)


def verdict_of(
    logits: Tensor,
    tokens: Tensor,
    *,
    expected: Tensor | None = None,
    spread: float = 0.0,
    deterministic: bool = True,
) -> Verdict:
    expected = EXPECTED if expected is None else expected
    golden = {
        "logits": expected,
        "tokens": expected.argmax(-1),
        "scores": expected,
        "noise-logits": expected + NOISE * random(1),
    }
    actual = {"logits": logits, "tokens": tokens, "scores": expected}
    model = SimpleNamespace(can_generate=True, model_dump=dict)
    manifest: Any = SimpleNamespace(
        model=model, inputs=SimpleNamespace(sampling={}), notes=[], reference={}
    )
    section: Any = SimpleNamespace(
        golden=manifest,
        dtype="bfloat16",
        outputs=("logits",),
        entry=SimpleNamespace(reference_deterministic=True, yardstick_dtype="float64"),
        batches=(BATCH,),
        tensors=lambda name: [golden[name]],
        load=lambda: LoadReport(compared=1),
        usage=lambda: Usage(parameters={"a": ["a.w"]}, called=["a"], read=["a.w"]),
    )
    candidate: Any = SimpleNamespace(
        attachments=(),
        attachment=lambda name: {"values": actual[name.rpartition(".")[0]]},
    )
    report: Any = SimpleNamespace(
        problems={},
        notes=[],
        deterministic=deterministic,
        spread=spread,
        weights_different=[],
        untied=[],
        run={},
        load=LoadReport(compared=1),
        changes=SetupChanges(),
    )
    check = GenerateCheck(model="", candidate=Run("cpu", "bfloat16"), level="logits")
    return judge_generation(GenerateEvidence(check, section, candidate, report)).verdict


WRONG = EXPECTED + 0.5 * random(2)


@pytest.mark.parametrize(
    ("spread", "diagnosis"), [(NOISE / 3, "module-error"), (0.2, "nondeterminism")]
)
def test_runs_that_differ_within_the_noise_are_not_what_is_wrong(
    spread: float, diagnosis: str
) -> None:
    verdict = verdict_of(WRONG, EXPECTED.argmax(-1), spread=spread, deterministic=False)

    assert (verdict.verdict, verdict.diagnosis) == (Outcome.FAIL, diagnosis)


def test_runs_that_do_not_differ_are_no_nondeterminism() -> None:
    assert verdict_of(WRONG, EXPECTED.argmax(-1)).diagnosis == "module-error"


@pytest.mark.parametrize("length", [3, 5])
def test_other_number_of_tokens_is_made_where_generation_ends(length: int) -> None:
    tokens = torch.cat([EXPECTED.argmax(-1), torch.zeros(2, 1, dtype=torch.long)], 1)

    verdict = verdict_of(EXPECTED, tokens[:, :length])

    assert (verdict.verdict, verdict.diagnosis) == (Outcome.FAIL, "sampler")
    assert verdict.location == Location(phase="sampler")
    # Two tokens of the prompt, then those that both have.
    position = 2 + min(length, 4)
    assert verdict.first_bad_token == TokenPosition(prompt=0, position=position, phase="decode")
    assert verdict.levels["tokens"].reason == f"batch 0: (2, {length}) tokens instead of (2, 4)"


def test_pass_with_a_near_tie_has_a_note_and_no_diagnosis() -> None:
    tokens = EXPECTED.argmax(-1)
    best = EXPECTED[0, 3].topk(2)
    tied = EXPECTED.clone()
    tied[0, 3, best.indices[1]] = best.values[0] - NOISE / 10
    tokens[0, 3] = best.indices[1]

    verdict = verdict_of(tied, tokens, expected=tied)

    assert (verdict.verdict, verdict.diagnosis) == (Outcome.PASS, None)
    (note,) = verdict.notes
    assert note == (
        "near-tie: 1 text chose a token whose score differs from the reference's choice by less than the"
        " noise"
    )


ROW = Measurement(
    level="modules", module="m", port="output", statistic="s", actual=1, expected=1, ratio=1
)


def judgement(outcome: Outcome, ratio: float | None = 1.0) -> Judgement:
    location = Location(phase="forward", module="m") if outcome is Outcome.FAIL else None
    verdict = Verdict(verdict=outcome, location=location, noise_ratio=ratio, limit=2.0)
    return Judgement(verdict, [ROW], [], None)


@pytest.mark.parametrize(
    ("outcomes", "worst", "note"),
    [
        (["PASS", "FAIL", "PASS"], 1, "each of 3 ranks is judged; FAIL: rank 1"),
        (["NOT_COMPARED", "PASS"], 0, "each of 2 ranks is judged; NOT_COMPARED: rank 0"),
        (["NOT_COMPARED", "FAIL"], 1, "each of 2 ranks is judged; FAIL: rank 1"),
        (["PASS", "PASS"], 0, "each of 2 ranks is judged; PASS: all"),
    ],
)
def test_the_worst_rank_decides(outcomes: list[str], worst: int, note: str) -> None:
    found = worst_of_ranks([judgement(Outcome(outcome)) for outcome in outcomes])

    assert found.verdict.verdict.value == outcomes[worst]
    assert found.verdict.notes == [note]
    assert [row.rank for row in found.measurements] == [worst]
    if found.verdict.location is not None:
        assert found.verdict.location.rank == worst


def test_where_all_ranks_fail_none_is_named() -> None:
    found = worst_of_ranks([judgement(Outcome.FAIL, 5.0), judgement(Outcome.FAIL, 9.0)])

    assert found.verdict.noise_ratio == 9.0
    assert found.verdict.location is not None
    assert found.verdict.location.rank == 0


def test_rank_with_the_place_decides_and_is_named_where_all_fail() -> None:
    """An error of one rank reaches the logits of all, by a larger ratio than at its place."""
    everywhere = judgement(Outcome.FAIL, 1e9)
    everywhere.verdict.location = None

    found = worst_of_ranks([everywhere, judgement(Outcome.FAIL, 5.0), everywhere])

    assert found.verdict.location is not None
    assert (found.verdict.location.module, found.verdict.location.rank) == ("m", 1)
    assert found.verdict.notes == ["each of 3 ranks is judged; FAIL: all"]


def test_a_ratio_that_is_no_number_is_the_worst() -> None:
    ranks = [judgement(Outcome.FAIL, 1e9), judgement(Outcome.FAIL, float("nan"))]

    assert [row.rank for row in worst_of_ranks(ranks).measurements] == [1]


def test_weights_that_differ_on_one_rank_explain_what_all_ranks_see() -> None:
    reports = [
        CandidateReport(run={}, deterministic=True, spread=spread, weights_different=different)
        for spread, different in ((0.0, []), (1.0, ["a.weight"]))
    ]

    united = merge_weight_facts(reports)

    assert [report.weights_different for report in united] == [["a.weight"], ["a.weight"]]
    assert [report.spread for report in united] == [0.0, 1.0]
