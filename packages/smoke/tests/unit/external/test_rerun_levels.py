"""Repeated and equivalent runs: limits, unchecked parts, and the precision of logged losses."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from assay.runs import SilentProgress
from assay.verdicts import Outcome
from assay_smoke.external import rerun_levels
from assay_smoke.external.rerun_levels import (
    _compare_splits,
    _describe_ends,
    _Difference,
    _first_other_loss,
    _judge_difference,
    judge_equivalent,
    judge_interruption,
    measure_apart,
    measure_spread,
    unit_in_log,
)
from assay_smoke.external.runs import Cycle, SavedModel
from assay_smoke.external.watched_run import LoggedStep

END = {"a": torch.tensor([3.0, 4.0])}
NEAR = {"a": torch.tensor([3.0, 4.001])}
MIDDLE = {"a": torch.tensor([3.0, 3.0])}
WHOLE = [4.0, 3.0, 2.0, 1.0]

CHECK = "`assay smoke data --accumulation` checks the divisor."
PADDING = "Or is padding not masked? `assay smoke data --collator` checks it."
UPDATE = "the update depends on the split, such as by clipping, the optimizer or the applied learning rate"
FIRST = "No update between steps precedes this loss: its rows, what the step computes of them or the logged mean depends on the split. Are rows missing, or losses not divided? Is it a mean of means over unequal token counts?"


def test_steps_that_agree_by_luck_are_no_measure() -> None:
    # The repeated run differs in the second step alone, and not in those that were resumed.
    losses = {"uninterrupted": WHOLE, "repeated": [4.0, 3.0001, 2.0, 1.0], "resumed": [2.0, 1.0001]}
    spread = measure_spread(
        losses, {"uninterrupted": END, "repeated": NEAR, "resumed": NEAR}, MIDDLE
    )
    assert spread.losses.value < 5
    assert spread.ends.value == pytest.approx(1.0)
    assert spread.moved == pytest.approx(0.2)


def test_losses_are_held_to_no_more_than_they_are_logged_to() -> None:
    losses = {"uninterrupted": WHOLE, "repeated": WHOLE, "resumed": [2.0, 1.0 + 2**-23]}
    spread = measure_spread(
        losses, {"uninterrupted": END, "repeated": NEAR, "resumed": END}, MIDDLE
    )
    assert spread.losses.value < 2


def test_two_ends_are_apart_by_a_share_of_what_training_changed() -> None:
    names = [str(number) for number in range(12)]
    base = dict.fromkeys(["frozen", *names], torch.zeros(2))
    end = dict.fromkeys(names, torch.tensor([3.0, 4.0])) | {"frozen": torch.zeros(2)}
    one = end | {"0": torch.tensor([0.0, 9.0])}
    several = one | {"1": torch.tensor([3.0, 4.5]), "2": torch.tensor([3.0, 4.5])}

    assert measure_apart(end, end, base) == 0
    assert measure_apart(one, end, base) == 0
    assert measure_apart(several, end, base) == pytest.approx(0.1)
    assert measure_apart({"0": end["0"]}, end, base) == float("inf")
    broken = end | {"0": torch.tensor([3.0, float("nan")])}
    assert measure_apart(broken, end, base) == float("inf")


@pytest.mark.parametrize(
    ("actual", "words"),
    [
        (3.0, ""),
        (2.5, "; the last checkpoints differ by 0.5 of the change since step 2"),
        (math.nan, ""),
    ],
)
def test_ends_are_described_by_a_positive_number_alone(
    actual: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = {Path("actual"): actual, Path("expected"): 3.0, Path("begin"): 2.0}
    monkeypatch.setattr(
        rerun_levels, "read_tensors", lambda _, folder: {"a": torch.tensor([ends[folder]])}
    )
    run: Any = SimpleNamespace(name="actual", first_step=2)
    cycle: Any = SimpleNamespace(
        uninterrupted=SimpleNamespace(name="expected"), end_of=lambda one: Path(one.name)
    )
    assert _describe_ends(cycle, run, Path("begin")) == words


def test_runs_that_the_seed_does_not_decide_are_named_first() -> None:
    expected, actual = [LoggedStep(1, 4.0, grad_norm=2.0)], [LoggedStep(1, 4.0, grad_norm=3.0)]
    spread = measure_spread(
        {"uninterrupted": WHOLE, "repeated": WHOLE, "resumed": WHOLE},
        {"uninterrupted": END, "repeated": MIDDLE, "resumed": END},
        MIDDLE,
    )
    cycle: Any = SimpleNamespace(
        spreads={"resume": spread}, library=SimpleNamespace(precision="float32")
    )
    level = _judge_difference(
        _Difference(expected, actual, 0.5, 1), "float32", "split", cycle
    ).level
    assert level.verdict is Outcome.NOT_COMPARED
    assert str(level.reason).startswith(
        "two uninterrupted runs of one seed differ by 1 of the change by training: do data, their order and all random"
        " numbers depend on {seed} alone? The difference: the norm of the gradient of step 1 is 2.0, and 3.0"
    )


@pytest.mark.parametrize(
    ("saved", "reason"),
    [
        ({}, "the last checkpoint is absent or incomplete"),
        ({9: SavedModel(9, problem="torn")}, "the last checkpoint is absent or incomplete"),
        ({9: SavedModel(9, {"a": ""}, not_finite=("a",))}, "the last checkpoint is not finite"),
    ],
)
def test_split_is_unchecked_without_a_whole_last_checkpoint(
    saved: dict[int, SavedModel], reason: str
) -> None:
    library = SimpleNamespace(split_otherwise=lambda: "another split", steps=9)
    run: Any = SimpleNamespace(library=library)

    level = judge_equivalent(Cycle(run, SilentProgress(), saved=saved)).level

    assert level.verdict is None
    assert (level.model_extra or {})["unchecked"] is True
    unchecked = "it was not checked whether training depends on the split"
    assert level.reason == f"{reason}: {unchecked}"


def cycle_of(whole: list[LoggedStep], kind: str = "hugging-face", narrowing: str = "") -> Any:
    """Return a cycle with the steps of its uninterrupted run."""
    return SimpleNamespace(
        uninterrupted=SimpleNamespace(values=[one.loss for one in whole], losses=whole),
        library=SimpleNamespace(ranks=1, precision=None, checkpoints=SimpleNamespace(kind=kind)),
        narrowing=narrowing,
    )


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        ([2.0, 1.0], None),
        (
            [2.5, 1.0],
            (
                "the loss of step 3 is 2.5, the uninterrupted run's 2.0 (no step precedes it since the"
                " resume: its rows, weights or random numbers differ)"
            ),
        ),
        (
            [2.0, 1.5],
            (
                "the loss of step 4 is 1.5, the uninterrupted run's 1.0 (the first loss after the resume"
                " agrees: the optimizer's state, the schedule, random numbers, later rows or gradients left"
                " over from earlier steps (a missing zero_grad) differ)"
            ),
        ),
    ],
)
def test_the_first_loss_that_differs_after_a_resume_names_its_causes(
    losses: list[float], reason: str | None
) -> None:
    whole = [LoggedStep(None, value) for value in WHOLE]
    cycle = cycle_of(whole)
    logged = [LoggedStep(step, value) for step, value in enumerate(losses)]
    run: Any = SimpleNamespace(first_step=2, values=losses, losses=logged)
    diagnosis = None if losses[0] == 2.5 else "checkpoint-mismatch"

    def wanted(words: str | None) -> Any:
        return words and (words, diagnosis)

    assert _first_other_loss(cycle, run) == wanted(reason)
    run.losses, cycle.uninterrupted.losses = (
        [LoggedStep(one.step, one.loss, learning_rate=0.1) for one in run_losses]
        for run_losses in (logged, whole)
    )
    assert _first_other_loss(cycle, run) == wanted(reason and reason.replace("the schedule, ", ""))
    run.losses = logged
    if losses[0] == 2.5:  # the first loss, which no learning rate has changed yet
        other = reason and reason.removesuffix(")") + "; its learning rates differ, too)"
    else:
        other = reason and reason.partition(" (")[0] + " (its learning rates differ)"
    assert _first_other_loss(cycle, run) == wanted(other)


LOST = "probably, the optimizer's state or the schedule{} was lost"
LEFT = "gradients are left over from earlier steps (a missing zero_grad), or clipping or accumulation differs"


@pytest.mark.parametrize(
    ("norm", "expected", "precision", "cause", "diagnosis"),
    [
        # Without zero_grad, measured with micro:llama.
        (1.064007, 1.5473531, "float32", f"but the norm of its gradient is 1.064007, the uninterrupted run's 1.5473531: {LEFT}", "missing-reduction"),
        (1.064007, 1.5473531, None, LEFT, "missing-reduction"),
        (1.5473531, 1.5473531, "float32", LOST.format(""), "checkpoint-mismatch"),
        (1.5481, 1.5473531, "float16", LOST.format(" or the loss scale"), "checkpoint-mismatch"),
        (math.inf, 1.5473531, "float16", LOST.format(" or the loss scale"), "checkpoint-mismatch"),
        (None, None, "float16", "the optimizer's state, the schedule, the loss scale, random numbers, later", "checkpoint-mismatch"),
    ],
)  # fmt: skip
def test_the_norm_after_a_resume_tells_gradients_from_state(
    norm: float | None, expected: float | None, precision: str | None, cause: str, diagnosis: str
) -> None:
    cycle = cycle_of([LoggedStep(None, value, grad_norm=expected) for value in WHOLE])
    cycle.library.precision = precision
    logged = [LoggedStep(None, value, grad_norm=norm) for value in (2.0, 1.5)]
    run: Any = SimpleNamespace(first_step=2, values=[2.0, 1.5], losses=logged)
    found = _first_other_loss(cycle, run)
    assert found is not None
    assert cause in found[0]
    assert found[1] == diagnosis


@pytest.mark.parametrize(
    ("loss", "kind", "narrowing", "end"),
    [
        (2.5, "hugging-face", "", "its rows, weights or random numbers differ)"),
        (2.5, "hugging-face", "checkpoints are narrow", "differ; checkpoints are narrow)"),
        (2.5, "adapter", "", "does anything outside of the adapter train? peft saves only what `modules_to_save` names)"),
        # Weights and rows are right.
        (2.0, "adapter", "checkpoints are narrow", "left over from earlier steps (a missing zero_grad) differ)"),
    ],
)  # fmt: skip
def test_lost_weights_are_suspected_where_the_checkpoint_may_lack_them(
    loss: float, kind: str, narrowing: str, end: str
) -> None:
    cycle = cycle_of([LoggedStep(None, value) for value in WHOLE], kind, narrowing)
    values = [loss, 1.5]
    logged = [LoggedStep(None, value) for value in values]
    run: Any = SimpleNamespace(first_step=2, values=values, losses=logged)
    found = _first_other_loss(cycle, run)
    assert found is not None
    assert found[0].endswith(end)


@pytest.mark.parametrize(
    ("value", "logged", "unit"),
    [
        (2.114, [2.114, 1.442, 10.23], 1e-3),  # four significant digits
        (10.23, [2.114, 0.5123, 10.23], 1e-2),
        (10.2345, [10.2345, 2.1145], 1e-4),  # four decimals
        (2.1145, [10.2345, 2.1145], 1e-4),
        (2.5e-5, [2.5e-5, 1.25e-5], 1e-7),
        (0.0, [0.0, 0.25], 1e-2),
        (2.0, [float("nan"), 2.5], 1e-1),
    ],
)
def test_the_unit_is_that_of_the_last_digit_that_is_logged(
    value: float, logged: list[float], unit: float
) -> None:
    assert unit_in_log(value, logged) == pytest.approx(unit)


@pytest.mark.parametrize(
    ("signalled_after", "newest", "reason"),
    [
        (None, None, "training ended before SIGTERM: use more `steps`"),
        (4, 4, "training ended before SIGTERM: use more `steps`"),
        (3, 4, "no step remains after the checkpoint of SIGTERM: use more `steps`"),
    ],
)
def test_an_interruption_without_a_step_to_resume_is_not_compared(
    signalled_after: int | None, newest: int | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = SimpleNamespace(on_sigterm="save", steps=4)
    interrupted = SimpleNamespace(
        library=library, signalled_after=signalled_after, hung_in=None, losses=WHOLE[:3]
    )
    cycle: Any = SimpleNamespace(
        library=library,
        saved={4: None},
        run=lambda *_, **__: interrupted,
    )
    found = {} if newest is None else {newest: Path()}
    monkeypatch.setattr(rerun_levels, "checkpoints_of", lambda _: found)

    level = judge_interruption(cycle).level

    assert (level.verdict, level.reason) == (Outcome.NOT_COMPARED, reason)


@pytest.mark.parametrize(
    ("norm", "diagnosis", "words"),
    [
        (16.0, "loss-scale", "The larger value is 8 times the other, as the quotient of the numbers of micro-batches. Their gradients are summed"),
        (8.0, "loss-scale", "as the quotient of the numbers of ranks. Their gradients are summed"),
        (4.0, "loss-scale", "numbers of micro-batches of a rank. Their gradients are summed"),
        (0.25, "loss-scale", "numbers of micro-batches. Their gradients are divided by it twice"),
        (7.9, "loss-scale", "3.95 times the other, close to 4, the quotient of the numbers of ranks. Their gradients are probably summed, and not divided by it, and token counts are unequal"),
        (0.95, "missing-reduction", "close to 2, the quotient of the numbers of micro-batches of a rank. Are gradients of a micro-batch or rank lost? Otherwise their gradients are divided by it twice"),
        (2 / 1.445, "missing-reduction", "(4.0, 4.0). How gradients are summed"),
        (2.8, "missing-reduction", "The loss of step 1 agrees within the float32 limit of 0.025 (4.0, 4.0). How gradients are summed, weighted or reduced depends on the split. Are those of a micro-batch or rank lost? Is it"),
    ],
)  # fmt: skip
def test_a_wrong_norm_of_the_gradient_names_its_likely_cause(
    norm: float, diagnosis: str, words: str
) -> None:
    expected, actual = [LoggedStep(1, 4.0, grad_norm=2.0)], [LoggedStep(1, 4.0, grad_norm=norm)]
    quotients = _compare_splits({"ranks": 4, "accumulation": 4}, {"accumulation": 2})
    found = _Difference(expected, actual, 0.0, 1, quotients).describe("float32")
    assert found is not None
    assert (found[:2], found[3]) == ((1, "backward"), diagnosis)
    assert words in found[2]


@pytest.mark.parametrize(
    ("logged", "words"),
    [
        ({}, "Gradients or updates depend on the split. A logged grad_norm would tell"),
        (
            {"learning_rate": 0.1, "grad_norm": 2.00001},
            "The norm of the gradient of step 1 agrees within the float32 limit of 0.00074 (2.00001, 2.00001). The update depends",
        ),
    ],
)
def test_a_later_loss_names_what_the_log_shows(logged: dict[str, float], words: str) -> None:
    first = LoggedStep(1, 4.0, **logged)
    expected = [first, LoggedStep(2, 3.0, **logged)]
    actual = [first, LoggedStep(2, 3.5, **logged)]
    found = _Difference(expected, actual, 0.0, 2).describe("float32")
    assert found is not None
    assert "The loss of step 1 agrees within the float32 limit of 0.025 (4.0, 4.0). " in found[2]
    assert words in found[2]


def test_a_smaller_norm_is_no_lost_gradient_if_its_rows_are_read_otherwise() -> None:
    # Padding on the left that is not masked, measured with micro:llama.
    quotients = _compare_splits({"accumulation": 1}, {"accumulation": 2})
    expected, actual = (
        [LoggedStep(1, loss, grad_norm=norm)]
        for loss, norm in ((2.045194, 1.919936), (2.090075, 3.045084))
    )
    found = _Difference(expected, actual, 0.0, 1, quotients).describe("float32")
    assert found is not None
    assert "lost?" not in found[2]
    assert "Are rows missing, or losses not divided? Is it a mean of means" in found[2]
    assert found[2].endswith(PADDING)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (16.0, "Their losses are summed, and not divided by it"),
        (1.0, "Their losses are divided by it twice"),
        (
            15.7,
            "3.925 times the other, close to 4, the quotient of the numbers of micro-batches. Their losses are probably summed",
        ),
        (
            1.1,
            "Are rows of a micro-batch or rank lost? Otherwise their losses are divided by it twice",
        ),
        (5.0, "Or is padding not masked? `assay smoke data --collator` checks it"),
    ],
)
def test_a_first_loss_that_is_a_multiple_names_its_missing_division(
    loss: float, words: str
) -> None:
    expected = [LoggedStep(1, 4.0, grad_norm=2.0)]
    actual = [LoggedStep(1, loss, grad_norm=loss / 2)]
    quotients = _compare_splits({"accumulation": 4}, {"accumulation": 1})
    found = _Difference(expected, actual, 0.0, 1, quotients).describe("float32")
    assert found is not None
    assert (found[:2], words in found[2]) == ((1, "forward"), True)


NORMS_AGREE = {"grad_norm": 2.00001, "learning_rate": 0.1}


@pytest.mark.parametrize(
    ("losses", "logged", "rates", "words", "absent"),
    [
        # A rate that differs in an earlier step explains all that follows.
        ([4.0, 3.0, 2.5], NORMS_AGREE, [0.1, 0.2, 0.3], "The learning rate of step 2 is 0.1, and 0.2: the schedule", "clipping"),
        ([4.0, 3.5, 2.0], NORMS_AGREE, [0.1, 0.2, 0.3], "or weights differ between ranks", "schedule"),
        # Gradients agree, so the logged value alone is wrong.
        ([4.5, 3.0, 2.0], NORMS_AGREE, [0.1] * 3, "The logged loss is not the mean over all rows.", "its rows"),
        ([4.5, 3.0, 2.0], {}, [None] * 3, "Do all ranks read the same rows?", "clipping"),
        ([4.0, float("nan"), 2.0], NORMS_AGREE, [0.1] * 3, "One of them is not finite", "clipping"),
    ],
)  # fmt: skip
def test_a_cause_is_only_named_if_the_log_does_not_explain_the_difference(
    losses: list[float], logged: dict[str, float], rates: list[Any], words: str, absent: str
) -> None:
    expected = [LoggedStep(step, 5.0 - step, **logged) for step in (1, 2, 3)]
    pairs = enumerate(zip(losses, rates, strict=True), 1)
    actual = [
        LoggedStep(step, loss, **(logged | ({"learning_rate": rate} if rate else {})))
        for step, (loss, rate) in pairs
    ]
    quotients = _compare_splits({"ranks": 1}, {"ranks": 2})
    found = _Difference(expected, actual, 0.0, 3, quotients).describe("float32")
    assert found is not None
    assert words in found[2]
    assert absent not in found[2]


@pytest.mark.parametrize(
    ("losses", "norms", "words"),
    [
        (  # a mean of means over unequal token counts, under autocast
            [5.5],
            [(1.878, 1.766)],
            (
                "The norm of the gradient of step 1 agrees within the bfloat16 limit of 0.19 (1.878, 1.766), which is too"
                f" wide to exclude the gradient. {FIRST} {CHECK} {PADDING}"
            ),
        ),
        (
            [5.0, 4.5],
            [(1.975, 1.776), (2.731, 2.205)],
            (
                "The loss of step 1 agrees within the bfloat16 limit of 0.028 (5.0, 5.0). The norm of the gradient of step"
                " 1 agrees within the bfloat16 limit of 0.19 (1.975, 1.776), which is too wide to exclude the gradient. Is"
                f" it a mean of means over unequal token counts? {CHECK} Otherwise {UPDATE}."
            ),
        ),
        (  # summed gradients with a loss that is wrong, too
            [6.5],
            [(3.76, 1.77)],
            (
                "The norm of the gradient of step 1 is 3.76, and 1.77. The larger value is 2.124 times the other, close"
                " to 2, the quotient of the numbers of micro-batches. Their gradients are probably summed, and not divided by"
                f" it, and token counts are unequal. {CHECK} {PADDING}"
            ),
        ),
    ],
)
def test_a_wide_limit_does_not_exclude_the_divisor(
    losses: list[float], norms: list[tuple[float, float]], words: str
) -> None:
    expected = [LoggedStep(n, 6.0 - n, grad_norm=due) for n, (due, _) in enumerate(norms, 1)]
    pairs = enumerate(zip(losses, norms, strict=True), 1)
    actual = [LoggedStep(n, loss, grad_norm=norm) for n, (loss, (_, norm)) in pairs]
    quotients = _compare_splits({"accumulation": 1}, {"accumulation": 2})
    found = _Difference(expected, actual, 0.0, len(losses), quotients).describe("bfloat16")
    assert found is not None
    assert found[2].endswith(f"from rounding in bfloat16. {words}")


# Losses and norms of train.py with a mean of means in float32, measured with micro:llama.
MEANS = [(6.40842247, 6.40718699), (5.53678894, 5.66876125), (6.16712856, 7.36073303)]
TOKENS = [(6.42559242, 6.41159296), (5.56321383, 5.82520723), (6.15691614, 7.44931459)]
NEAR_LIMIT = "The norm of the gradient of step 1 agrees within the float32 limit of 0.00073 (6.40718699, 6.41159296), which is too wide to exclude the gradient. "


@pytest.mark.parametrize(
    ("num_steps", "norm", "apart", "words"),
    [
        (3, 6.41159296, 0.0, f"{NEAR_LIMIT}The norm of the gradient of step 2 is 5.66876125, and 5.82520723. {FIRST} {CHECK} {PADDING}"),
        (1, 6.41159296, 0.0, f"{NEAR_LIMIT}{FIRST} {CHECK} {PADDING}"),  # near its limit
        (1, 6.407187, 0.1, f"(6.40718699, 6.407187). {FIRST} {CHECK} {PADDING}"),  # weights differ
        (1, 6.407187, 0.0, "(6.40718699, 6.407187). The logged loss is not the mean over all rows."),
    ],
)  # fmt: skip
def test_the_logged_loss_alone_is_wrong_only_if_all_else_agrees(
    num_steps: int, norm: float, apart: float, words: str
) -> None:
    expected, actual = (
        [LoggedStep(step, loss, grad_norm=one) for step, (loss, one) in enumerate(values, 1)]
        for values in (MEANS[:num_steps], [(TOKENS[0][0], norm), *TOKENS[1:num_steps]])
    )
    quotients = _compare_splits({"accumulation": 1}, {"accumulation": 2})
    found = _Difference(expected, actual, apart, num_steps, quotients).describe("float32")
    assert found is not None
    assert found[2].endswith(words)


def test_the_same_rows_on_all_ranks_are_no_summed_gradient() -> None:
    # Measured with micro:llama on two ranks.
    quotients = _compare_splits({"ranks": 1, "accumulation": 1}, {"ranks": 2, "accumulation": 2})
    expected, actual = (
        [LoggedStep(1, loss, grad_norm=norm)]
        for loss, norm in ((5.84847784, 8.44128704), (6.50608778, 5.56513691))
    )
    found = _Difference(expected, actual, 0.0, 1, quotients).describe("float32")
    assert found is not None
    assert found[3] is None
    assert "summed" not in found[2]
    rows = "Do all ranks read the same rows? `assay smoke data --sampler` checks it."
    assert found[2].endswith(f"{FIRST} {CHECK} {PADDING} {rows}")


def test_values_that_are_not_finite_in_both_runs_agree() -> None:
    # A loss scale may overflow in the first steps.
    expected, actual = ([LoggedStep(1, 4.0, grad_norm=float(word))] for word in ("inf", "inf"))
    assert _Difference(expected, actual, 0.0, 1).describe("float16") is None
    whole = [LoggedStep(None, 1.0), LoggedStep(None, float("nan"))]
    again = [LoggedStep(None, float("nan"))]
    run: Any = SimpleNamespace(first_step=1, values=[again[0].loss], losses=again)
    assert _first_other_loss(cycle_of(whole), run) is None


def test_logged_values_are_judged_step_by_step_by_roundoff_and_their_last_digit() -> None:
    expected = [LoggedStep(1, 4.0, grad_norm=2.0), LoggedStep(2, 3.0)]
    actual = [LoggedStep(1, 4.1, grad_norm=2.5), LoggedStep(2, 3.0)]

    ratios = _Difference(expected, actual, 0.25, 2).ratios("float32")

    root = 2.0**-12  # of the unit roundoff of float32
    assert [(step, port, one.actual, one.expected) for step, port, one in ratios] == [
        (1, "loss", pytest.approx(0.025), root / 8 + 0.1 / 4),
        (1, "grad_norm", 0.25, 3 * root + 0.1 / 2),
        (2, "loss", 0.0, root / 8 + 0.1 / 3),
        (2, "end", 0.25, 3 * root),
    ]
