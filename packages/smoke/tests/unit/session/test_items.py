"""Retried items, exit codes of a session, and its page."""

from pathlib import Path

from assay.errors import MachineError
from assay.runs import SilentProgress
from assay.runs.results import write_results
from assay.verdicts import Level, Outcome, Verdict
from assay_smoke.cases.timeline import PhaseTime
from assay_smoke.session.items import SessionItem, run_with_retry
from assay_smoke.session.results import CaseResult, SessionReport, phases_of, write_page


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
    result = run_with_retry(item, folder, SilentProgress())
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
