"""Losses in the log of a library."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from assay.errors import UsageError
from assay_smoke.external.library import Losses
from assay_smoke.external.watched_run import LoggedStep, LossReader, Run

STEP_AND_LOSS = Losses(pattern=r"step (?P<step>\d+) loss (?P<loss>\S+)")


def test_losses_are_found_in_lines() -> None:
    reader = LossReader(STEP_AND_LOSS, None)
    for line in ("begin", "step 1 loss 2.5", "[rank 0] step 2 loss nan"):
        reader.take(line)

    assert reader.found[0] == LoggedStep(1, 2.5)
    assert reader.found[1].step == 2
    assert math.isnan(reader.found[1].loss)


def test_what_several_ranks_log_of_one_step_counts_once() -> None:
    reader = LossReader(STEP_AND_LOSS, None)
    for line in ("step 1 loss 2.5", "step 1 loss 2.5", "step 2 loss 2.5"):
        reader.take(line)

    assert reader.found == [LoggedStep(1, 2.5), LoggedStep(2, 2.5)]


def test_losses_without_steps_all_count() -> None:
    reader = LossReader(Losses(pattern="'loss': '(?P<loss>[^']+)'"), None)
    for line in ("{'loss': '2.5', 'epoch': '0'}", "{'loss': '2.5'}", "{'train_loss': '2.5'}"):
        reader.take(line)

    assert reader.found == [LoggedStep(None, 2.5), LoggedStep(None, 2.5)]


def test_a_learning_rate_stands_beside_its_loss(tmp_path: Path) -> None:
    by_pattern = LossReader(Losses(pattern=r"loss (?P<loss>\S+) lr (?P<lr>\S+)"), None)
    by_pattern.take("loss 2.5 lr 1e-3")
    log = tmp_path / "log.jsonl"
    in_file = LossReader(Losses(file="log.jsonl", learning_rate="lr"), log)
    log.write_text('{"loss": 2.5, "lr": 0.001}\n', encoding="utf-8")
    in_file.poll()

    assert by_pattern.found == in_file.found == [LoggedStep(None, 2.5, 1e-3)]


def test_what_is_no_number_is_an_error() -> None:
    with pytest.raises(
        UsageError, match=r"`loss` of losses.pattern gives '2,5', which is not a num"
    ):
        LossReader(STEP_AND_LOSS, None).take("step 1 loss 2,5")


@pytest.mark.parametrize("step", ["nan", "inf", "1e999"])
def test_a_step_that_is_no_whole_number_is_an_error(step: str) -> None:
    reader = LossReader(Losses(pattern=r"step (?P<step>\S+) loss (?P<loss>\S+)"), None)
    with pytest.raises(
        UsageError, match=f"`step` of losses.pattern gives '{step}', which is not a num"
    ):
        reader.take(f"step {step} loss 2.5")


def test_a_line_nested_beyond_the_parser_is_not_a_loss(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    reader = LossReader(Losses(file="log.jsonl"), log)
    log.write_text("[" * 100_000 + '\n{"step": 1, "loss": 2.5}\n', encoding="utf-8")
    reader.poll()

    assert reader.found == [LoggedStep(1, 2.5)]


def test_losses_are_read_from_lines_of_json_as_they_are_written(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    reader = LossReader(Losses(file="log.jsonl", step="n", loss="train/loss"), file)
    reader.poll()
    with file.open("w", encoding="utf-8") as log:
        log.write('{"n": 1, "train/loss": 2.5}\n{"n": 1, "lr": 0.1}\nno JSON\n{"n": 2, "trai')
    reader.poll()
    assert reader.found == [LoggedStep(1, 2.5)]
    with file.open("a", encoding="utf-8") as log:
        log.write('n/loss": 2.25}\n')
    reader.poll()
    reader.poll()

    assert reader.found == [LoggedStep(1, 2.5), LoggedStep(2, 2.25)]


def test_what_a_copied_output_holds_already_does_not_count(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text('{"step": 1, "loss": 2.5}\n', encoding="utf-8")
    reader = LossReader(Losses(file="log.jsonl"), file)
    with file.open("a", encoding="utf-8") as log:
        log.write('{"step": 2, "loss": 2.0}\n')
    reader.poll()

    assert reader.found == [LoggedStep(2, 2.0)]


def test_a_file_that_is_begun_anew_is_read_from_its_begin(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text('{"step": 1, "loss": 2.5}\n' * 3, encoding="utf-8")
    reader = LossReader(Losses(file="log.jsonl"), file)
    file.write_text('{"step": 2, "loss": 2.0}\n', encoding="utf-8")
    reader.poll()

    assert reader.found == [LoggedStep(2, 2.0)]


@pytest.mark.parametrize("rate", ["lr", "learning_rate"])
def test_usual_names_of_json_are_read_without_a_key(rate: str, tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    reader = LossReader(Losses(file="log.jsonl"), file)
    file.write_text(f'{{"step": 1, "loss": 2.5, "{rate}": 0.1, "grad_norm": 3.0}}\n')
    reader.poll()

    assert reader.found == [LoggedStep(1, 2.5, 0.1, 3.0)]


TORCHRUN = """\
W1129 20:45:48.156000 75 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 80 closing signal SIGTERM
E1129 20:45:48.159000 75 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {code}) local_rank: 1 (pid: 81) of binary: /bin/python
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
=======================================================
"""


def ended(folder: Path, text: str, exit_code: int) -> Run:
    """Return a run with this log."""
    library: Any = SimpleNamespace(steps=9)
    run = Run("uninterrupted", library, folder, folder, folder)
    run.log.write_text(text, encoding="utf-8")
    run.exit_code = exit_code
    return run


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("loading\nValueError: no rows\n", "its last error is 'ValueError: no rows'"),
        ("loading\nno rows\n", "its last line is 'no rows'"),
        (
            "step=9\nFatal Python error: Aborted\n\nThread 0x1:\n" + TORCHRUN.format(code=-6),
            "local rank 1 was ended by SIGABRT; its last error is 'Fatal Python error: Aborted'",
        ),
        (
            "step=9\nterminate called after throwing an instance of 'c10::Error'\n  what():  closed\n"
            "Fatal Python error: Aborted\n\nThread 0x1:\n" + TORCHRUN.format(code=-6),
            "last error is \"terminate called after throwing an instance of 'c10::Error': what():  closed\"",
        ),
        (
            "[rank1]: RuntimeError: no room\n[rank0]: ConnectionError: closed by peer\n"
            + TORCHRUN.format(code=1),
            "local rank 1 ended with exit code 1; its last error is '[rank1]: RuntimeError: no room'",
        ),
        (
            "stopping\n" + TORCHRUN.format(code=3),
            "local rank 1 ended with exit code 3; its last line is 'stopping'",
        ),
        ("", "it printed nothing"),
    ],
)
def test_a_bad_end_quotes_the_error_of_the_rank_that_ended_first(
    text: str, words: str, tmp_path: Path
) -> None:
    assert words in str(ended(tmp_path, text, 1).describe_bad_end())
