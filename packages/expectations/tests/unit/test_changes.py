"""Changes between two captures, and their description."""

import pytest

from assay.verdicts import Outcome
from assay_expectations.changes import change_as_markdown, find_change, judge_pair
from assay_expectations.records import Expectation, Key
from packages.expectations.tests.unit.sample_expectations import (
    CONTENT,
    MACHINE,
    NOISE,
    distributions,
    expectation,
    off,
)

EXPECTED = expectation(2)


def captured(*errors: float, **update: object) -> Expectation:
    """The expectation, captured with other errors."""
    given = distributions(*[off(error) for error in errors])
    signature = EXPECTED.signature.model_copy(update={"captured": given})
    return EXPECTED.model_copy(update={"signature": signature} | update)


@pytest.mark.parametrize(
    ("times", "kind", "outcome"),
    [
        (1.2, "noise", Outcome.PASS),  # clean runs reached 1.59
        (1.8, "drift", Outcome.PASS),
        (2.1, "break", Outcome.FAIL),  # over 2
    ],
)
def test_size_decides_the_kind_of_change(times: float, kind: str, outcome: Outcome) -> None:
    verdict, rows, change = judge_pair(EXPECTED, captured(times * NOISE, times * NOISE))
    assert (change.kind, verdict.verdict) == (kind, outcome)
    assert verdict.noise_ratio == pytest.approx(times)
    assert len(rows) == 3


def test_difference_between_captures_is_noise() -> None:
    wide = EXPECTED.model_copy(
        update={"captures": [dict.fromkeys(EXPECTED.limits, ratio) for ratio in (1.0, 1.6)]}
    )
    assert find_change(wide, captured(1.5 * NOISE, 1.5 * NOISE)).kind == "noise"


def test_modules_with_larger_errors_are_listed_in_order() -> None:
    before = EXPECTED.model_copy(
        update={"layers": {"a": 0.1, "b": 0.0, "c": 0.1, "d": 0.1, "e": 0.1}}
    )
    now = captured(NOISE, layers={"a": 0.19, "b": 1e-9, "c": float("nan"), "d": 0.21})
    assert [layer.module for layer in find_change(before, now).grown] == ["b", "c", "d"]


def test_token_that_moved_most_comes_first() -> None:
    change = find_change(EXPECTED, captured(NOISE, 5 * NOISE))
    (first,) = change.moved
    assert (first.batch, first.row, first.position, first.id) == (0, 0, 1, 0)
    assert (first.expected, first.actual) == pytest.approx((-1 + NOISE, -1 + 5 * NOISE))


def test_captures_of_different_content_are_not_compared() -> None:
    content = CONTENT.model_copy(update={"tokenizer_hash": "t2"})
    verdict, rows, change = judge_pair(
        EXPECTED, captured(NOISE, NOISE, key=Key(machine=MACHINE, content=content))
    )
    assert (change.kind, verdict.verdict, rows) == ("other", Outcome.NOT_COMPARED, [])
    assert verdict.levels["signature"].reason == "different tokenizer"


def test_captures_of_different_tokens_are_not_compared() -> None:
    signature = EXPECTED.signature.model_copy(update={"tokens": [[[2, 3]]]})
    change = find_change(EXPECTED, EXPECTED.model_copy(update={"signature": signature}))
    assert change.content == ["different tokens of the yardsticks"]


def test_pull_request_shows_the_change_and_its_environment() -> None:
    before = EXPECTED.provenance
    provenance = before.model_copy(
        update={
            "versions": {"torch": "2.14.0", "driver": "7"},
            "process": {"date": "2026-02-01", "cpu": "C2", "variables": {"OMP_NUM_THREADS": "4"}},
            "approved_by": "Ada",
            "reason": "new driver",
        }
    )
    actual = captured(NOISE, 5 * NOISE, provenance=provenance)
    text = change_as_markdown(EXPECTED, actual, find_change(EXPECTED, actual))
    assert (
        text
        == """### micro:llama on acme/bfloat16: break

Over a limit: logits-error is 0.0361 = 3.61x the older noise (limit 2x).

| statistic | error | ratio to the older noise | limit |
|---|---|---|---|
| logits-error | 0.0361 | 3.61x **over** | 2x |
| logits-worst | 0.05 | 5x **over** | 3x |
| logits-whole | 0.0361 | 3.61x **over** | 2x |

Tokens that moved most (in units of the older noise):

| batch, row, token | units | id | log-probability before | now |
|---|---|---|---|---|
| 0, 0, 1 | 4 | 0 | -0.99 | -0.95 |

One of the captures has no errors of modules.

To find the operation: `assay check generate micro:llama --reference cpu/float32 --candidate acme/bfloat16`.

Other changes since the older capture:

- torch is 2.14.0, expected 2.13.0
- cpu is C2, expected absent
- variable OMP_NUM_THREADS is 4, expected absent

Provenance:

- before: unknown date, 1 captures, approved by nobody
- now: 2026-02-01, 1 captures, approved by Ada: new driver
"""
    )
