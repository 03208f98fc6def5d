"""Sessions that are refused before any case runs, and retried items."""

import json
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from assay.errors import MachineError, UsageError
from assay.runs import SilentProgress
from assay.runs.results import write_results
from assay.verdicts import Level, Outcome, Verdict
from assay_smoke.commands import app
from assay_smoke.external.watched_run import Run, require_runnable
from assay_smoke.session.command import (
    CaseResult,
    SessionItem,
    SessionOptions,
    SessionReport,
    external_item,
    run_session,
    run_with_retry,
    write_page,
)
from assay_smoke.timelines import PhaseTime, phases_of
from assay_smoke.trainers.deepspeed import trainer


def test_cases_of_a_library_that_is_not_installed_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def find(name: str) -> ModuleSpec | None:
        return None if name == "deepspeed" else find_spec(name)

    monkeypatch.setattr(trainer, "find_spec", find)
    ran: list[object] = []
    names = ("one-process-1", "zero3-1", "zero1-1")

    with pytest.raises(UsageError) as raised:
        run_session(SessionOptions(names), tmp_path / "run", lambda result, *_: ran.append(result))

    assert str(raised.value) == (
        "zero3-1 and 1 more cannot be run: the trainer deepspeed needs DeepSpeed: pip install"
        " 'assay-smoke[deepspeed]', or leave them out: -k 'not zero'"
    )
    assert ran == []


def test_a_file_that_is_not_there_is_refused_also_where_k_leaves_its_name_out(
    tmp_path: Path,
) -> None:
    missing, output = tmp_path / "smoke.toml", tmp_path / "run"
    words = ["run", f"command:{missing}", "-k", "one-process-1", "--output", str(output)]
    done = CliRunner().invoke(app, words)
    assert str(done.exception).startswith(f"{missing}: cannot be read: No such file")
    assert not output.exists()


def test_a_library_trains_on_the_device_of_the_option(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    toml = tmp_path / "smoke.toml"
    toml.write_text(
        'launch = ["{python}", "train.py", "--device", "{device}"]\n'
        'resume = ["{resume_from}"]\nlosses.file = "log"\ncheckpoints.folder = "{step}"\n'
    )
    for own, expected in ((None, "cpu"), ("sim", "sim")):
        library = require_runnable(toml, own)
        launched = Run("uninterrupted", library, tmp_path, tmp_path, tmp_path)
        assert launched.command()[-1] == expected
    assert external_item(toml, "sim").command == f"assay smoke run command:{toml} --device sim"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            SessionOptions(("one-process-1",), keyword="fsdp"),
            "nothing to run: -k 'fsdp': no case of one-process-1 matches",
        ),
        (
            SessionOptions(("one-process-1",), precision="bfloat16"),
            "nothing to run: --run cpu/bfloat16: no case of one-process-1 matches",
        ),
        (
            SessionOptions(("mine/good.toml",)),
            "mine/good.toml is not a case; for a library's file write command:mine/good.toml",
        ),
        (
            SessionOptions(("comand:mine/good.toml",)),
            "comand:mine/good.toml is not a case; for a library's file write command:mine/good.toml",
        ),
        (
            SessionOptions(("command:good.toml",), trainer="reference"),
            "--trainer is for cases, not for command:good.toml, whose file has its own keys",
        ),
        (
            SessionOptions(("command:good.toml",), cards=2),
            "--cards is for cases, not for command:good.toml, whose file has its own keys",
        ),
        (
            SessionOptions(("command:good.toml",), timeout=9.0),
            "--timeout is for cases, not for command:good.toml, whose file has its own keys",
        ),
        (
            SessionOptions(("one-process-1", "command:good.toml"), precision="float32"),
            "the dtype of --run is for cases, not for command:good.toml, whose file has its own keys",
        ),
        (SessionOptions(("fsdp-2",), cards=1), "fsdp-2 needs 2 cards, and --cards is 1"),
    ],
)
def test_what_leaves_nothing_or_is_no_case_is_named(
    tmp_path: Path, options: SessionOptions, message: str
) -> None:
    ran: list[object] = []
    with pytest.raises(UsageError) as raised:
        run_session(options, tmp_path / "run", lambda result, *_: ran.append(result))
    assert str(raised.value) == message
    assert ran == []


def _try_with(folder: Path, *ends: str | Exception | None) -> CaseResult:
    """Run an item whose tries end in turn with a reason, an error, or None for a pass."""
    left = list(ends)

    def run(at: Path, progress: object) -> Verdict:
        del progress
        end = left.pop(0)
        if isinstance(end, Exception):
            raise end
        outcome = Outcome.PASS if end is None else Outcome.FAIL
        level = Level(verdict=outcome, reason=end, compared=1)
        return write_results(Verdict(verdict=outcome, levels={"run": level}), [], at)

    item = SessionItem("fsdp-2", "assay smoke run fsdp-2", run)
    result = run_with_retry((item, folder), SilentProgress())
    assert not left
    return result


def _report(*results: CaseResult) -> SessionReport:
    return SessionReport(
        schema=1, device="cpu", cases=list(results), seconds=1.0, pairs_covered=0, pairs_possible=0
    )


def test_a_numerical_failure_is_never_run_again(tmp_path: Path) -> None:
    result = _try_with(tmp_path, "the loss is nan")

    assert (result.outcome, result.tries, result.infrastructure) == (Outcome.FAIL, 1, None)
    assert _report(result).exit_code == 1


def test_what_the_machine_failed_at_is_run_once_more(tmp_path: Path) -> None:
    result = _try_with(tmp_path, "No space left on device", None)

    assert (result.outcome, result.tries, result.tried_again_for) == (
        Outcome.PASS,
        2,
        "out of disk",
    )
    assert _report(result).exit_code == 0


def test_a_machine_that_fails_twice_says_nothing_of_the_case(tmp_path: Path) -> None:
    error = MachineError("No space left on device")

    result = _try_with(tmp_path, error, error)

    assert (result.outcome, result.tries, result.infrastructure) == (Outcome.FAIL, 2, "out of disk")
    assert _report(result).exit_code == 2


def test_what_cannot_be_judged_is_an_error_in_all_files(tmp_path: Path) -> None:
    def run(*_: object) -> Verdict:
        raise UsageError("losses.pattern matches no line:\n  it prints no losses")

    item = SessionItem("mine", "assay smoke run command:mine", run, is_planned=False)
    result = run_with_retry((item, tmp_path), SilentProgress())
    report = _report(result)

    assert (result.outcome, report.exit_code) == ("ERROR", 2)
    assert result.reason == "losses.pattern matches no line:\n  it prints no losses"
    assert json.loads(report.model_dump_json())["cases"][0]["outcome"] == "ERROR"
    assert 'href="cases/mine/"' in write_page(report, tmp_path).read_text()
    assert [*(tmp_path / "cases/mine").iterdir()] == []


def test_a_failure_after_one_of_the_machine_is_the_case_s_own(tmp_path: Path) -> None:
    result = _try_with(tmp_path, "No space left on device", "the loss is nan")

    assert (result.tries, result.tried_again_for, result.infrastructure) == (2, "out of disk", None)
    assert _report(result).exit_code == 1


def test_each_result_of_the_page_opens_its_report(tmp_path: Path) -> None:
    page = write_page(_report(_try_with(tmp_path, None)), tmp_path)

    assert f'href="{(link := "cases/fsdp-2/report.html")}"' in page.read_text()
    assert (tmp_path / link).is_file()


def test_a_run_that_ends_in_its_first_instant_has_a_page(tmp_path: Path) -> None:
    instant = PhaseTime(phase="set-up", number=None, begin=3.0, end=None)
    folder = tmp_path / "timelines/train"
    folder.mkdir(parents=True)
    (folder / "rank-0.jsonl").write_text(instant.model_dump_json() + "\n")
    result = CaseResult(
        name="fsdp-2", outcome=Outcome.FAIL, seconds=1.0, phases=phases_of(tmp_path)
    )

    assert "never finished" in write_page(_report(result), tmp_path).read_text()
