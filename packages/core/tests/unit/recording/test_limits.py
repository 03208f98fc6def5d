"""Passes that a capture leaves out: warm-up, turned off, over the budget."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from assay import compare
from assay.dumps.recognizing import open_dump
from assay.errors import UsageError
from assay.recording.capture import capture
from assay.recording.limits import Budget, Control, Cost, Grade, WarmUp, parse_size, parse_time
from assay.trace import Trace
from assay.verdicts import Outcome


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def steps_of(folder: Path) -> list[int]:
    return [call.site.step for call in Trace.open(folder).calls if not call.site.module]


def ports_of(folder: Path) -> list[tuple[str, ...]]:
    return [call.ports for call in Trace.open(folder).calls if not call.site.module]


@pytest.mark.parametrize(("text", "size"), [("20G", 20_000_000_000), ("1.5 MB", 1_500_000)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1M", "1.2.3G", "10P", "0"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size such as 500M"):
        parse_size(text)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("5m", 300), ("1.5 H", 5400)])
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "0m", "5 minutes", "-1s"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a time"):
        parse_time(text)


@pytest.mark.parametrize(("max_bytes", "max_seconds"), [(1000, None), (None, 10.0)])
def test_grades_fall_at_half_and_at_nine_tenths(
    tmp_path: Path, max_bytes: int | None, max_seconds: float | None
) -> None:
    budget = Budget(tmp_path, max_bytes, max_seconds, "everything")
    found: list[Grade] = []
    reasons = []
    for percent in (0, 20, 40, 45, 75, 85, 92, 99, 101):
        reasons.append(budget.lower_grade(Cost(10 * percent, percent / 10)))
        found.append(budget.grade)
    # At 40% a pass more, of 20%, would be over half; at 75% one more of 30% over nine tenths.
    assert found == [
        "everything", "everything", "outputs", "outputs", "statistics", "statistics", "statistics",
        "nothing", "nothing",
    ]  # fmt: skip
    assert sum(reason is not None for reason in reasons) == 3


def test_a_budget_is_kept_and_lower_grades_are_in_the_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = nn.Linear(256, 256)
    with capture(net, tmp_path / "t", max_disk="1M"):  # each pass takes 512 KiB in all
        for number in range(12):
            net(torch.full((256, 256), float(number)))
    trace = Trace.open(tmp_path / "t")
    stored = {trace.stored(call, port) for call in trace.calls for port in call.ports}
    size = sum(torch.Size(one.shape).numel() * 4 for one in stored)
    assert 250_000 < size <= 1_100_000
    kinds = ["".join(ports) for ports in ports_of(tmp_path / "t")]
    assert kinds[0] == "input.inputoutput"
    assert "output" in kinds
    assert kinds[-1] == "input.input.statisticsoutput.statistics"
    assert "outputs instead of everything: a pass more is over 50% of 1 MB" in str(
        trace.manifest["lowered"]
    )
    errors = capsys.readouterr().err
    assert errors.count("assay: capture takes at most 0.5 MB") == 1
    assert errors.count("assay: capture records outputs instead of everything") == 1


@pytest.mark.parametrize(("text", "first"), [("2", 2.0), ("2x3", 1.0), ("0", 0.0), ("1x1", 0.0)])
def test_warm_up_passes_are_not_counted(tmp_path: Path, text: str, first: float) -> None:
    net = nn.Identity()
    with capture(net, tmp_path / "t", warmup=text):
        net(torch.zeros(2, 3))
        for number in range(1, 4):
            net(torch.full((4, 3), float(number)))
    trace = Trace.open(tmp_path / "t")
    assert steps_of(tmp_path / "t") == list(range(4 - int(first)))
    assert float(trace.tensor(trace.calls[0], "output")[0, 0]) == first


@pytest.mark.parametrize("text", ["", "x", "-1", "2x", "many"])
def test_invalid_warm_ups_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="neither a number of passes nor a shape"):
        WarmUp.parse(text)


def test_a_file_turns_the_capture_off_and_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net, file = nn.Identity(), tmp_path / "control.json"
    texts = (None, '{"capture": false}', "nonsense", '{"capture": true, "tokens": "5:"}', "{}")
    with capture(net, tmp_path / "t", control=str(file)):
        for text in texts:
            if text is not None:
                file.write_text(text)
            net(torch.zeros(2, 3))
            net(torch.ones(2, 3))
    # Off from the second text on; nonsense changes nothing; of the fourth, passes from 5 on.
    assert steps_of(tmp_path / "t") == [0, 1, 6, 7, 8, 9]
    message = f'assay: {file}: ignored, since it is not like {{"capture": true, "tokens": "0:16"}}'
    assert capsys.readouterr().err.count(message) == 1


@pytest.mark.parametrize(
    "text", ["[]", '{"capture": 1}', '{"tokens": 3}', '{"tokens": "x"}', '{"other": 1}', "\0"]
)
def test_an_invalid_control_file_is_reported_once(tmp_path: Path, text: str) -> None:
    file = tmp_path / "control.json"
    file.write_text(text)
    control = Control(file)
    assert str(control.poll()).startswith(f"{file}: ignored, since ")
    assert control.poll() is None
    assert control.is_on


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"level": "all"}, "level='all': choose from"),
        ({"max_seconds": float("nan")}, "is not a positive number"),
        ({"max_seconds": -3}, "is not a positive number"),
        ({"max_disk": -1}, "is not a size"),
        ({"steps": 1.5}, "is not a list of ranges"),
        ({"include": "*.down"}, r"no module of the model matches include='\*.down'"),
    ],
)
def test_invalid_options_are_refused(tmp_path: Path, options: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        capture(nn.Linear(2, 2), tmp_path / "t", **options).start()


def test_a_deleted_folder_ends_the_capture_and_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = nn.Linear(2, 2)
    with capture(net, tmp_path / "t"):
        net(torch.ones(2))
        while not (tmp_path / "t" / "index.jsonl").read_text():
            time.sleep(0.01)
        shutil.rmtree(tmp_path / "t")
        for number in range(3):
            net(torch.full((2,), float(number)))
    assert "No such file or directory" in capsys.readouterr().err


def test_a_capture_without_a_call_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = nn.Linear(2, 2)
    with capture(net, tmp_path / "t", steps="100"):
        net(torch.ones(2))
    assert f"assay: {tmp_path / 't'}: no call was recorded\n" in capsys.readouterr().err


def test_longer_runs_without_token_ids_are_paired_by_step(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    for name, num_steps in (("short", 3), ("long", 5)):
        with capture(net, tmp_path / name):
            for step in range(num_steps):
                net(torch.full((2, 4), float(step)))
    verdict = compare(tmp_path / "short", tmp_path / "long", output=tmp_path / "out")
    assert verdict.verdict is Outcome.PASS


class Flip(nn.Module):
    """Reverses the channels if it is on, which no norm shows."""

    is_on = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(-1) if self.is_on else x.clone()


@pytest.mark.parametrize("step", [0, 2])
def test_statistics_locate_the_module_in_the_first_step_that_differs(
    tmp_path: Path, step: int
) -> None:
    flip = Flip()
    net = nn.Sequential(nn.Linear(8, 8), flip, nn.Linear(8, 8))
    for name in ("golden", "fault"):
        x = torch.ones(2, 8)
        with capture(net, tmp_path / name, stats_only=True):
            for number in range(4):
                flip.is_on = name == "fault" and number == step
                x = torch.tanh(net(x))  # later steps depend on it, as those of generation do
    verdict = compare(tmp_path / "golden", tmp_path / "fault", output=tmp_path / "out")
    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert verdict.location.module == "1"


def test_other_models_of_a_process_forbid_a_pass(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    for name in ("golden", "mine"):
        for folder in (tmp_path / name, tmp_path / name / "process-7-2"):
            with capture(net, folder):
                net(torch.ones(2))
    verdict = compare(tmp_path / "golden", tmp_path / "mine", output=tmp_path / "out")
    assert verdict.verdict is Outcome.NOT_COMPARED
    problems = open_dump(tmp_path / "golden").problems
    assert "process-7-2" in problems[0]
