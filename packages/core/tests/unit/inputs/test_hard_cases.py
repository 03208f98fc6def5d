"""Which hard cases a plan reaches."""

import pytest

from assay.inputs import Batch, BatchOptions, ModelLimits, describe_hard_cases, plan_batches

PAD = "left padding"
WINDOW = "sequence longer than the sliding window"
FAR = "positions over 1,000"
CHUNKS = "chunked prefill"
DECODE = "decode with a cache"

LIMITS = ModelLimits(vocab_size=260, max_positions=2048, sliding_window=32)


def batch(*lengths: int, new_tokens: int = 0, chunk: int | None = None) -> Batch:
    rows = tuple((1,) * length for length in lengths)
    return Batch(0, rows, tuple(range(len(rows))), 0, new_tokens, chunk)


def test_defaults_cover_every_case() -> None:
    plan = plan_batches(LIMITS, BatchOptions(), lambda text: list(text.encode()))
    assert describe_hard_cases(plan.batches, LIMITS) == dict.fromkeys(
        (PAD, WINDOW, FAR, CHUNKS, DECODE), True
    )


def test_one_short_prompt_covers_no_case() -> None:
    assert describe_hard_cases([batch(5)], LIMITS) == dict.fromkeys(
        (PAD, WINDOW, FAR, CHUNKS, DECODE), False
    )


@pytest.mark.parametrize(
    ("case", "short", "reaching"),
    [
        (PAD, batch(5, 5), batch(5, 6)),
        (WINDOW, batch(32), batch(33)),
        (WINDOW, batch(20, new_tokens=13), batch(20, new_tokens=14)),
        (FAR, batch(1001), batch(1002)),
        (CHUNKS, batch(256, chunk=256), batch(257, chunk=256)),
        (DECODE, batch(5, new_tokens=1), batch(5, new_tokens=2)),
    ],
)
def test_case_is_reached_from_its_first_token_on(case: str, short: Batch, reaching: Batch) -> None:
    assert describe_hard_cases([short], LIMITS)[case] is False
    assert describe_hard_cases([short, reaching], LIMITS)[case] is True


def test_case_that_cannot_occur_in_the_model_is_none() -> None:
    limits = ModelLimits(vocab_size=260, max_positions=1001, can_generate=False)
    reach = describe_hard_cases([batch(5, 6)], limits)
    assert reach == {PAD: True, WINDOW: None, FAR: None, CHUNKS: None, DECODE: None}
