"""What a failure without a place is called, from the levels tokens and logits alone."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.comparing.coverage import Usage
from assay.comparing.limits import load_limits
from assay.generate.judging.evidence import GenerateEvidence
from assay.generate.judging.verdict import judge_generation
from assay.inputs import Batch
from assay.models.loaded.report import LoadReport, SetupChanges
from assay.verdicts import Location, Outcome, TokenPosition, Verdict

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
        model=model,
        inputs=SimpleNamespace(sampling={}),
        notes=[],
        reference={},
        sections={
            "bfloat16": SimpleNamespace(reference_deterministic=True, yardstick_dtype="float64")
        },
    )
    section: Any = SimpleNamespace(
        batches=(BATCH,),
        tensors=lambda name: [golden[name]],
        trace=SimpleNamespace(manifest={"dtype": "bfloat16"}),
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
    evidence = GenerateEvidence(manifest, section, candidate, report, load_limits(), "logits")
    return judge_generation(evidence).verdict


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
        "near-tie: 1 text with another token than the reference's, where the gap between the two is within"
        " the noise"
    )
