"""Kinds of tensors that the tool of ACTUAL never records."""

import pytest
import torch

from assay.offline.check import CompareOptions, compare_dumps
from assay.runs import SilentProgress
from assay.verdicts import Outcome, Verdict
from packages.core.tests.unit.offline.memory_dump import Values, make_dump

X = torch.arange(1.0, 17.0).reshape(1, 1, 16)
MODULES: Values = {
    ("model.norm", "input.0", 0): X,
    ("model.norm", "output", 0): 2 * X,
    ("lm_head", "output", 0): 3 * X,
    ("", "output.logits", 0): 3 * X,
}
LOGITS: Values = {("", "output.logits", 0): 3 * X}


def compare(expected: Values, actual: Values, **options: object) -> Verdict:
    sides = make_dump(expected), make_dump(actual)
    comparison = CompareOptions("a", "b", **options)  # type: ignore[arg-type]
    return compare_dumps(comparison, *sides, SilentProgress()).verdict


def reason(verdict: Verdict) -> str:
    return str(verdict.levels["completeness"].reason)


@pytest.mark.parametrize("actual", [LOGITS, {("lm_head", "output", 0): 3 * X}])
def test_a_trace_of_logits_passes_at_the_level_of_logits(actual: Values) -> None:
    verdict = compare(MODULES, actual)
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert reason(verdict).endswith(
        "ACTUAL holds nothing of single modules: --level logits compares what both hold"
    )
    assert compare(MODULES, actual, level="logits").verdict is Outcome.PASS


def test_logits_that_no_compared_port_repeats_stay_missing() -> None:
    expected = {**MODULES, ("lm_head", "output", 0): 4 * X}
    verdict = compare(expected, LOGITS, level="logits")
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert verdict.unmatched.expected == ["lm_head:output"]
    wrong = {("", "output.logits", 0): 3.1 * X}
    assert compare(MODULES, wrong, level="logits").verdict is Outcome.FAIL


@pytest.mark.parametrize(
    ("port", "words"),
    [
        ("parameter.weight", "parameters"),
        ("changed.past_key_values.0.keys", "values that calls change in place"),
    ],
)
def test_a_kind_that_actual_never_holds_is_named_with_its_option(port: str, words: str) -> None:
    expected = {**MODULES, ("model.norm", port, 0): X}
    kind = port.partition(".")[0]
    verdict = compare(expected, MODULES)
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert reason(verdict).endswith(
        f"ACTUAL holds no {words}: --allow-unmatched '*:{kind}*' excuses them"
    )
    excused = compare(expected, MODULES, allow_unmatched=(f"*:{kind}*",))
    assert excused.verdict is Outcome.PASS
    assert "expected items that --allow-unmatched excuses: 1" in excused.notes


def test_a_kind_that_actual_holds_elsewhere_has_no_excuse() -> None:
    verdict = compare(
        MODULES,
        {key: value for key, value in MODULES.items() if key[1] != "input.0"}
        | {("lm_head", "input.0", 0): X},
    )
    assert "--allow-unmatched" not in reason(verdict)
