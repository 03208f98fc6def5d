"""Scripts whose training depends on the split of a step's rows: each fault is named."""

import json
import sys
from pathlib import Path

import pytest

from assay.runs import SilentProgress
from assay.verdicts import Outcome, Verdict
from assay_smoke.external.levels import run_external
from assay_smoke.session.command import reason_of

SCRIPT = Path(__file__).parents[1] / "split_training.py"
LOSSES = "losses.pattern = 'step (?P<step>\\d+) loss (?P<loss>\\S+)'\n"
SPLIT = "--batch-size {batch_size} --accumulation {accumulation} --ranks {ranks}"


def run(folder: Path, fault: str = "", *, split: str = SPLIT, keys: str = "") -> Verdict:
    """Judge the script with a fault. split: part of its launch line; keys: more lines of its file."""
    toml = folder / "split.toml"
    toml.write_text(
        f'launch = "{sys.executable} {SCRIPT} --model {{model}} --output {{output}} --steps {{steps}}'
        f' --save-every {{save_every}} {split}"\n'
        'resume = "--resume-from {resume_from}"\n'
        "steps = 4\nsave_every = 2\nranks = 2\ntime_limit_seconds = 100\n"
        f"environment.FAULT = {json.dumps(fault)}\n"
        + ("" if "losses." in keys else LOSSES)
        + 'checkpoints.folder = "{output}/step-{step}"\n'
        f"{keys}\n",
        encoding="utf-8",
    )
    results = folder / "results"
    results.mkdir()
    return run_external(toml, results, SilentProgress())


@pytest.mark.long
@pytest.mark.parametrize("clip", ["", " --clip 20"])
def test_a_clean_script_passes_with_every_loss_and_the_last_checkpoint_compared(
    tmp_path: Path, clip: str
) -> None:
    verdict = run(tmp_path, split=SPLIT + clip, keys='precision = "float32"')

    level = verdict.levels["equivalent"]
    assert verdict.verdict is Outcome.PASS, level.reason
    assert level.compared == 4 + 1
    # Summation in another order differs in the last digit: two equal runs would show nothing.
    assert 0 < (level.model_extra or {})["apart"] < 1e-5


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("schedule stepped once a micro-batch", "Gradients or updates depend on the split"),
        ("schedule stepped once a rank", "Gradients or updates depend on the split"),
        ("only the last micro-batch", "Gradients or updates depend on the split"),
        ("only the first micro-batch", "Gradients or updates depend on the split"),
        ("last micro-batch skipped", "Gradients or updates depend on the split"),
        ("clipped once a micro-batch", "Gradients or updates depend on the split"),
        ("decayed once a micro-batch", "of step 1 is"),
        ("optimizer stepped once a micro-batch", "the loss of step 1 is"),
        ("gradient scaled by micro-batches", "Gradients or updates depend on the split"),
        ("loss not divided", "the loss of step 1 is"),
        ("mean of means", "the loss of step 1 is"),
        ("ranks not reduced", "Gradients or updates depend on the split"),
        ("ranks averaged", "Gradients or updates depend on the split"),
        ("last row of a rank dropped", "No update between steps precedes this loss: its rows"),
        ("rows depend on the split", "No update between steps precedes this loss: its rows"),
        ("masks by rank", "what the step computes of them"),
        ("loss of one rank logged", "or the logged mean depends"),
    ],
)
def test_training_that_depends_on_the_split_fails(tmp_path: Path, fault: str, words: str) -> None:
    split = f"{SPLIT} --clip 20" if "clipped" in fault else SPLIT
    verdict = run(tmp_path, fault, split=split, keys='precision = "float32"')

    failed = [name for name, one in verdict.levels.items() if one.verdict is Outcome.FAIL]
    reason = str(verdict.levels["equivalent"].reason)
    assert failed == ["equivalent"], reason
    assert words in reason
    assert "limit" in reason
    assert reason.endswith(
        "(split by ranks 2, accumulation 2, batch_size 2, and by ranks 1, accumulation 1, batch_size 8)"
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "keys", "words"),
    [
        ("ends early", "", "the equivalent run ended with exit code 1 before its first loss"),
        ("dropout", "", "has attention_dropout 0.1, which makes training depend on the split"),
        ("not seeded", "", "depend on {seed} alone?"),
        (
            "decayed once a micro-batch",
            "",
            "rounding in bfloat16 would explain it: write `precision`",
        ),
        ("", 'equivalent = "python -c 0"', "it logged 0 losses, the uninterrupted run 4"),
        ("writes no configuration", "", "has no config.json"),
    ],
)
def test_what_cannot_be_compared_is_no_pass(
    tmp_path: Path, fault: str, keys: str, words: str
) -> None:
    verdict = run(tmp_path, fault, keys=keys)

    assert verdict.levels["equivalent"].verdict is Outcome.NOT_COMPARED
    assert words in str(verdict.levels["equivalent"].reason)
    assert verdict.verdict is not Outcome.PASS


NORM = "losses.pattern = 'loss (?P<loss>\\S+) norm (?P<grad_norm>\\S+)'\nprecision = \"float32\""


@pytest.mark.long
def test_gradients_that_are_not_divided_show_in_their_logged_norm_alone(tmp_path: Path) -> None:
    scale_free = f"{SPLIT} --scale-free"
    (tmp_path / "unlogged").mkdir()
    unlogged = run(tmp_path / "unlogged", "gradient scaled by micro-batches", split=scale_free)
    assert unlogged.levels["equivalent"].verdict is Outcome.PASS
    unchecked = (
        "equivalent: no grad_norm is logged, so a wrong scale of the gradients was not checked"
    )
    assert unlogged.notes[0] == reason_of(unlogged) == unchecked

    verdict = run(tmp_path, "gradient scaled by micro-batches", split=scale_free, keys=NORM)

    reason = str(verdict.levels["equivalent"].reason)
    assert verdict.verdict is Outcome.FAIL, reason
    assert "the norm of the gradient of step 1 is" in reason
    assert (
        "The larger value is 4 times the other, as the quotient of the numbers of micro-batches."
        in reason
    )
    assert "Their gradients are divided by it twice" in reason
    assert verdict.diagnosis == "loss-scale"
    assert (verdict.statistic, verdict.limit) == ("norm-error", 1.0)
    assert verdict.noise_ratio is not None
    assert verdict.noise_ratio > 1000
    assert verdict.location is not None
    assert (verdict.location.phase, verdict.location.step) == ("backward", 1)


@pytest.mark.parametrize(
    ("fault", "words", "diagnosis"),
    [
        ("loss not divided", "Their losses are summed, and not divided by it", "loss-scale"),
        (
            "ranks not reduced",
            "Are those of a micro-batch or rank lost?",
            "missing-reduction",
        ),
        ("mean of means", "Is it a mean of means over unequal token counts?", None),
        (
            "only the last micro-batch",
            "Are those of a micro-batch or rank lost?",
            "missing-reduction",
        ),
    ],
)
def test_the_size_of_a_difference_names_its_likely_cause(
    tmp_path: Path, fault: str, words: str, diagnosis: str | None
) -> None:
    verdict = run(tmp_path, fault, keys=NORM)

    assert words in str(verdict.levels["equivalent"].reason)
    assert verdict.diagnosis == diagnosis


def test_a_loss_of_one_rank_is_told_by_the_norm_that_agrees(tmp_path: Path) -> None:
    verdict = run(tmp_path, "loss of one rank logged", keys=NORM)

    reason = str(verdict.levels["equivalent"].reason)
    assert verdict.verdict is Outcome.FAIL, reason
    assert "The norm of the gradient of step 1 agrees within the float32 limit" in reason
    assert "The logged loss is not the mean" in reason


def test_norms_of_a_clean_script_agree(tmp_path: Path) -> None:
    verdict = run(tmp_path, split=f"{SPLIT} --scale-free", keys=NORM)

    assert verdict.verdict is Outcome.PASS, verdict.levels["equivalent"].reason
    assert verdict.levels["equivalent"].compared == 4 + 4 + 1
    assert reason_of(verdict) is None


@pytest.mark.parametrize(
    ("split", "keys", "why"),
    [
        ("--batch-size 2 --accumulation 2", "", "has no {batch_size} and {accumulation}"),
        ("--batch-size {batch_size} --accumulation 2", "", "has no {batch_size} and"),
        (SPLIT, "equivalent = []", "`equivalent` is []: it was not checked"),
    ],
)
def test_a_pass_without_another_split_names_what_was_not_checked(
    tmp_path: Path, split: str, keys: str, why: str
) -> None:
    verdict = run(tmp_path, "schedule stepped once a micro-batch", split=split, keys=keys)

    assert verdict.verdict is Outcome.PASS
    assert verdict.levels["equivalent"].verdict is None
    unchecked = (
        "it was not checked whether accumulation, reduction over ranks, clipping and schedule"
    )
    assert unchecked in verdict.notes[0]
    assert why in verdict.notes[0]
    assert unchecked in str(reason_of(verdict))


def test_a_declared_launch_line_is_the_equivalent(tmp_path: Path) -> None:
    line = "--batch-size 2 --accumulation 2"
    whole = line.replace("2", "4", 1).replace("2", "1")
    equivalent = (
        f"{sys.executable} {SCRIPT} --model {{model}} --output {{output}} --steps {{steps}}"
        f" --save-every {{save_every}} {whole}"
    )
    keys = f"equivalent = {json.dumps(equivalent)}"

    verdict = run(tmp_path, "only the last micro-batch", split=line, keys=keys)

    reason = str(verdict.levels["equivalent"].reason)
    assert verdict.verdict is Outcome.FAIL, reason
    assert reason.endswith("(split by `launch` and by `equivalent`)")
