"""Verdicts on two dumps, and their words."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.comparison.check import CompareOptions, compare_dumps
from assay.comparison.judging.verdict import judge_dumps
from assay.comparison.measured_dumps import measure_dumps
from assay.comparison.replaying import Replayed
from assay.dumps.protocol import DumpError
from assay.judge.dump_wording import REPLAY_AGREES
from assay.runs import SilentProgress
from assay.verdicts import Location, Outcome, Verdict
from packages.core.tests.dump_writers.msprobe import dumped
from packages.core.tests.unit.comparison.memory_dump import Values, make_dump
from packages.core.tests.unit.comparison.small_dumps import (
    Block,
    Change,
    Network,
    double_scale,
    judge,
    write,
)
from packages.core.tests.unit.comparison.test_check import as_statistics


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    return write(tmp_path / "golden")


TWO_PROMPTS = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]])


def write_prefill(folder: Path, ids: Tensor, change: Change = lambda _: None) -> Path:
    torch.manual_seed(1)
    network = Network()
    change(network)
    with torch.no_grad(), dumped(network, folder):
        network(ids)
    return folder


def test_a_prompt_that_actual_lacks_forbids_a_pass(tmp_path: Path) -> None:
    both, first = write_prefill(tmp_path / "2", TWO_PROMPTS), tmp_path / "1"
    verdict = judge(both, write_prefill(first, TWO_PROMPTS[:1]), tmp_path / "out")
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert "8 tokens of other passes" in verdict.unmatched.expected
    assert judge(first, both, tmp_path / "swapped").verdict is Outcome.PASS


def test_a_shorter_prompt_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    whole = write_prefill(tmp_path / "whole", TWO_PROMPTS[:1])
    part = write_prefill(tmp_path / "part", TWO_PROMPTS[:1, :5])
    verdict = judge(whole, part, tmp_path / "out")
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert str(verdict.headline).startswith("Everything with a partner agrees")


def test_unrelated_prompts_are_reported(tmp_path: Path) -> None:
    one = write_prefill(tmp_path / "one", TWO_PROMPTS)
    other = write_prefill(tmp_path / "other", TWO_PROMPTS[:1, :3] + 16)
    verdict = judge(one, other, tmp_path / "out")
    assert verdict.diagnosis == "inputs-differ"
    assert verdict.headline == "The prompts differ: no prompt of EXPECTED is in ACTUAL."


def double_everything(network: Any) -> None:
    with torch.no_grad():
        network.embed.weight *= 2


@pytest.mark.parametrize(
    ("noise", "problem"),
    [
        ("mine", "it is ACTUAL itself"),
        ("golden", "it is EXPECTED itself, whose error is 0"),
        ("other prompts", "it holds other prompts than EXPECTED"),
        ("doubled", "far beyond rounding"),
    ],
)
def test_noise_that_would_excuse_anything_is_refused(
    golden: Path, tmp_path: Path, noise: str, problem: str
) -> None:
    mine = write(tmp_path / "mine", double_scale)
    write(tmp_path / "other prompts", ids=torch.arange(8).reshape(1, 8) + 1)
    write(tmp_path / "doubled", double_everything)
    with pytest.raises(DumpError, match=problem):
        judge(golden, mine, tmp_path / "out", noise=str(tmp_path / noise))


def test_the_first_wrong_step_is_named_and_not_the_worst(golden: Path, tmp_path: Path) -> None:
    class Worsening(Block):
        calls = 0

        def forward(self, hidden: Tensor) -> Tensor:
            self.calls += 1
            result: Tensor = super().forward(hidden) * (1 + 1e-3 * 10**self.calls)
            return result

    def worsen(network: Any) -> None:
        network.layers[1].__class__ = Worsening

    # The name of its class is part of msprobe's key, and not of the address.
    verdict = judge(golden, write(tmp_path / "mine", worsen), tmp_path / "out")
    assert verdict.location is not None
    assert (verdict.location.module, verdict.location.step) == ("layers.1", 0)


def test_a_weight_that_is_nan_is_shown(golden: Path, tmp_path: Path) -> None:
    def spoil(network: Any) -> None:
        with torch.no_grad():
            network.layers[0].up.weight[2, 7] = torch.nan

    del golden
    expected = write(tmp_path / "with", parameters=True)
    actual = write(tmp_path / "mine", spoil, parameters=True)
    verdict = judge(expected, actual, tmp_path / "out")
    assert "most at row 2, column 7: nan" in str(verdict.headline)


def test_a_pass_states_noise_resolution_and_extra_tensors(golden: Path, tmp_path: Path) -> None:
    more = write(tmp_path / "more", parameters=True)
    verdict = judge(golden, more, tmp_path / "out")
    assert verdict.verdict is Outcome.PASS
    notes = " ".join(verdict.notes)
    assert "only in ACTUAL (14)" in notes
    assert "judged by the noise expected of its dtype and depth" in notes
    assert str(verdict.headline).endswith("; every value is equal.")


def test_a_mistyped_map_is_refused(golden: Path, tmp_path: Path) -> None:
    names = tmp_path / "map.json"
    names.write_text('{"layers.9": "layers.0"}')
    with pytest.raises(DumpError, match=r"--map: EXPECTED has no module layers\.9"):
        judge(golden, golden, tmp_path / "out", name_map=str(names))


def test_a_damaged_file_forbids_a_pass_and_hides_no_failure(golden: Path, tmp_path: Path) -> None:
    mine = write(tmp_path / "mine", double_scale)
    next(mine.rglob("*lm_head*output.0.pt")).write_text("no tensor")
    verdict = judge(golden, mine, tmp_path / "out")
    assert verdict.verdict is Outcome.FAIL
    assert "not a file of torch.save" in str(verdict.levels["completeness"].reason)


def test_an_error_made_at_the_place_is_not_called_accumulated(golden: Path, tmp_path: Path) -> None:
    verdict = judge(golden, write(tmp_path / "mine", double_scale), tmp_path / "out")
    reason = str(verdict.levels["modules"].reason)
    assert reason.startswith("relative error ")
    assert reason.endswith("; its inputs agree: the error is made here")


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


def test_a_token_that_is_not_the_largest_logit_is_the_sampler_s() -> None:
    logits = torch.zeros(1, 2, 10)
    logits[0, 1, 3] = 1.0
    values = {("embed", "input.0", 0): torch.tensor([[1, 2]]), ("lm_head", "output", 0): logits}
    both = [values | {("embed", "input.0", 1): torch.tensor([[token]])} for token in (3, 4)]
    verdict = compare(*both)
    assert verdict.verdict is Outcome.FAIL
    assert (verdict.diagnosis, verdict.location) == ("sampler", Location(phase="sampler"))
    # Without logits, nothing shows which token is the largest.
    unknown = compare(*[{site: one[site] for site in one if site[0] == "embed"} for one in both])
    assert (unknown.verdict, unknown.diagnosis) == (Outcome.NOT_COMPARED, None)


@pytest.mark.parametrize("replayed", [None, Replayed(None, 5)])
def test_modules_that_a_replay_confirms_are_said_to_agree(replayed: Replayed | None) -> None:
    names = ("embed", "layers.0.mlp", "norm", "lm_head")
    values = {(name, "output", 0): X for name in names}
    wrong = {(name, "output", 0): 1.1 * X for name in ("embed", "norm", "lm_head")}
    expected, actual = (make_dump(one, is_ordered=False) for one in (values, values | wrong))
    options = CompareOptions("a", "b")
    dumps = measure_dumps(options, expected, actual, SilentProgress(), None, ())
    verdict, _ = judge_dumps(replace(dumps, replayed=replayed))
    levels = verdict.levels
    agreement = "" if replayed is None else f"; {REPLAY_AGREES}"
    assert levels["modules"].reason == f"2 of 3 places differ{agreement}"
    assert (levels["modules"].model_extra or {}).get("replayed") == (replayed and 5)
    assert levels["logits"].reason == "1 of 1 places differ"
    assert "replayed" not in (levels["logits"].model_extra or {})
