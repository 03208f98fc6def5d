"""The words of verdicts on two dumps: ports, tokens, parameters and suspects."""

from pathlib import Path
from typing import Any

import pytest
import torch

from assay.offline.check import CompareOptions, compare_dumps
from assay.runs import SilentProgress
from assay.verdicts import Outcome, Verdict
from packages.core.tests.unit.offline.memory_dump import Values, make_dump
from packages.core.tests.unit.offline.small_dumps import judge, write
from packages.core.tests.unit.offline.test_check import as_statistics

X = torch.arange(1.0, 17.0).reshape(1, 1, 16)


def compare(expected: Values, actual: Values) -> Verdict:
    sides = make_dump(expected), make_dump(actual)
    return compare_dumps(CompareOptions("a", "b"), *sides, SilentProgress()).verdict


def test_the_second_result_of_a_module_is_named() -> None:
    values = {("a", "output.0", 0): X, ("a", "output.1", 0): X}
    verdict = compare(values, values | {("a", "output.1", 0): 1.1 * X})
    assert verdict.headline == "a (forward, step 0), output.1, is the first that differs."
    verdict = compare(values, values | {("a", "output.0", 0): 1.1 * X})
    assert verdict.headline == "a (forward, step 0) is the first that differs."


def test_values_that_must_be_equal_are_named_by_their_port() -> None:
    choice = torch.tensor([[[1, 2, 3, 4]]])
    verdict = compare({("a", "output.1", 0): choice}, {("a", "output.1", 0): choice + 1})
    assert verdict.verdict is Outcome.FAIL
    reason = str(verdict.levels["modules"].reason)
    assert reason.startswith("1.0 of the values of output.1 differ; they must be equal; ")


def test_two_results_of_a_module_are_one_suspect() -> None:
    values = {("a", "input.0", 0): X, ("a", "output.0", 0): X, ("a", "output.1", 0): X}
    wrong = {("a", "output.0", 0): 1.1 * X, ("a", "output.1", 0): 1.2 * X}
    verdict = compare(values, values | wrong)
    assert [one.location.module for one in verdict.suspects] == ["a"]
    assert verdict.suspects[0].error == pytest.approx(0.2)


def test_a_parameter_of_statistics_differs_by_its_norm(tmp_path: Path) -> None:
    def grow(network: Any) -> None:
        with torch.no_grad():
            network.layers[1].down.weight *= 2

    golden = as_statistics(write(tmp_path / "golden", parameters=True))
    mine = as_statistics(write(tmp_path / "mine", grow, parameters=True))
    verdict = judge(golden, mine, tmp_path / "out", stats=True)
    assert verdict.headline == (
        "layers.1.down.weight differs: relative difference of the norms 1.0."
    )


@pytest.mark.parametrize(
    ("factor", "words"), [(1.0 + 1e-7, "near-tie at"), (1e6, "generated texts")]
)
def test_a_near_tie_needs_logits_that_agree(factor: float, words: str) -> None:
    """Each side chooses its largest logit: 3, or 4 if that is larger."""
    ids, logits = torch.tensor([[1, 2]]), torch.zeros(1, 2, 10)
    logits[0, 1, 3:5] = 1.0
    other = logits.clone()
    other[0, 1, 4] = factor
    values = {("embed", "input.0", 0): ids, ("lm_head", "output", 0): logits}
    expected = values | {("embed", "input.0", 1): torch.tensor([[3]])}
    actual = values | {
        ("lm_head", "output", 0): other,
        ("embed", "input.0", 1): torch.tensor([[4]]),
    }
    verdict = compare(expected, actual)
    level = Outcome.PASS if words == "near-tie at" else Outcome.FAIL
    assert verdict.levels["tokens"].verdict is level
    assert str(verdict.levels["tokens"].reason).startswith(words)
