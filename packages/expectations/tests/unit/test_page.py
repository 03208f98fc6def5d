"""The page of all expectations: newest verdicts, git history, and hostile text that stays harmless."""

import json
import os
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest
import typer

from assay.errors import UsageError
from assay.files import seal
from assay.foreign_text import escape_output
from assay.runs.results import write_verdict
from assay.verdicts import Level, Outcome, Verdict
from assay_expectations.capture_and_verify import read_files
from assay_expectations.changes import change_as_markdown, find_change
from assay_expectations.commands import page
from assay_expectations.page import Cell, collect_cells, describe_states, write_page
from assay_expectations.records import Expectation, read_expectation, write_expectation
from packages.core.tests.poison import (
    assert_harmless_html,
    assert_harmless_markdown,
    assert_harmless_text,
    poisoned,
)
from packages.expectations.tests.unit.sample_expectations import expectation

NOW = datetime(2026, 7, 11, 12, tzinfo=UTC)


def captured(
    folder: Path,
    model: str,
    dtype: str = "bfloat16",
    approved_by: str | None = "Ada",
    **content: object,
) -> Expectation:
    made = expectation()
    machine = made.key.machine.model_copy(update={"dtype": dtype})
    key = {"machine": machine, "content": made.key.content.model_copy(update=content)}
    process = {"date": "2026-07-01T09:30:00+00:00"}
    whole = made.model_copy(
        update={
            "model": model,
            "key": made.key.model_copy(update=key),
            "provenance": made.provenance.model_copy(
                update={"process": process, "approved_by": approved_by, "reason": "a new driver"}
            ),
        }
    )
    return read_expectation(write_expectation(whole, folder))


def verdict_about(
    one: Expectation,
    runs: Path,
    name: str,
    outcome: Outcome,
    file: str = "",
    candidate: Mapping[str, str] | None = None,
    **details: object,
) -> None:
    folder = runs / name
    folder.mkdir(parents=True)
    level = Level(verdict=outcome, compared=4, expectation=one.hash, **details)
    levels = {file or one.name: level}
    made = Verdict(verdict=outcome, levels=levels, candidate=candidate or {}, compared=4)
    write_verdict(made, folder)


def set_date(file: Path, date: str) -> None:
    content = json.loads(file.read_text())
    content["environment"]["date"] = date
    file.write_text(seal(content))


def cells_of(tmp_path: Path) -> dict[tuple[str, str], Cell]:
    cells = collect_cells(
        read_files([tmp_path / "kept"])[0], tmp_path / "runs", tmp_path / "page.html", NOW
    )
    return {(cell.model, cell.machine.dtype): cell for cell in cells}


def test_every_model_has_a_cell_on_every_machine(tmp_path: Path) -> None:
    kept, runs = tmp_path / "kept", tmp_path / "runs"
    passing, failing = captured(kept, "one"), captured(kept, "one", "float32")
    captured(kept, "unseen")
    stale = captured(kept, "stale")
    verdict_about(passing, runs, "1", Outcome.PASS)
    verdict_about(failing, runs, "2", Outcome.FAIL, reason="9x", stale=False)
    verdict_about(stale, runs, "3", Outcome.FAIL, reason="the prompts", stale=True)

    cells = cells_of(tmp_path)

    assert {place: cell.state for place, cell in cells.items()} == {
        ("one", "bfloat16"): "pass",
        ("one", "float32"): "fail",
        ("stale", "bfloat16"): "stale",
        ("stale", "float32"): "missing",
        ("unseen", "bfloat16"): "unseen",
        ("unseen", "float32"): "missing",
    }
    seen = cells["one", "float32"].seen
    assert seen is not None
    assert (seen.reason, seen.report) == ("9x", "runs/2/report.html")
    assert cells["one", "bfloat16"].age_days == 10
    assert describe_states([*cells.values()]) == "1 fail, 1 stale, 2 missing, 1 unseen, 1 pass"


def test_newest_verdict_of_the_current_capture_counts(tmp_path: Path) -> None:
    one = captured(tmp_path / "kept", "one")
    other = one.model_copy(update={"hash": "of an older capture"})
    verdict_about(other, tmp_path / "runs", "older", Outcome.PASS)
    assert cells_of(tmp_path)["one", "bfloat16"].state == "unseen"

    verdict_about(one, tmp_path / "runs", "b", Outcome.FAIL, reason="9x")
    verdict_about(one, tmp_path / "runs", "a", Outcome.PASS)
    set_date(tmp_path / "runs" / "b" / "verdict.json", "2001-01-01T00:00:00")
    assert cells_of(tmp_path)["one", "bfloat16"].state == "pass"


def test_runs_of_another_file_or_model_do_not_count(tmp_path: Path) -> None:
    one = captured(tmp_path / "kept", "one", approved_by=None)
    runs = tmp_path / "runs"
    verdict_about(one, runs, "copy", Outcome.FAIL, file="before", reason="9x")
    for name, candidate in (("patched", {"setup": "p.py:setup"}), ("other", {"model": "other"})):
        stale = name == "other"
        verdict_about(one, runs, name, Outcome.FAIL, candidate=candidate, reason="9x", stale=stale)
    cells = [*cells_of(tmp_path).values()]
    assert describe_states(cells) == (
        "1 unseen; left out: 2 verdicts on another model (other files by --model, or a setup function)"
    )
    page = write_page(cells, "2026-07-11", tmp_path / "page.html").read_text()
    assert (
        "left out, because they judge another model (other files by --model, or a setup function): 2 runs<"
        in page
    )
    assert "to approve it" not in page

    verdict_about(one, runs, "path", Outcome.PASS, file=f"/ci/kept/{one.name}.json")
    assert cells_of(tmp_path)["one", "bfloat16"].state == "pass"


@pytest.mark.parametrize(
    ("outcome", "state"), [(Outcome.PASS, "pass"), (Outcome.FAIL, "fail")], ids=["pass", "fail"]
)
def test_run_of_the_same_model_in_another_place_counts(
    tmp_path: Path, outcome: Outcome, state: str
) -> None:
    one = captured(tmp_path / "kept", "one")
    verdict_about(one, tmp_path / "runs", "ci", outcome, candidate={"model": "/ci/one"})
    assert cells_of(tmp_path)["one", "bfloat16"].state == state


def test_failure_is_shown_for_simultaneous_runs(tmp_path: Path) -> None:
    one = captured(tmp_path / "kept", "one")
    for name, outcome in (("a", Outcome.PASS), ("b", Outcome.FAIL), ("c", Outcome.PASS)):
        verdict_about(one, tmp_path / "runs", name, outcome, reason="9x")
        set_date(tmp_path / "runs" / name / "verdict.json", "2026-07-10T08:00:00")
    assert cells_of(tmp_path)["one", "bfloat16"].state == "fail"


def test_a_file_with_a_name_of_its_own_has_a_row(tmp_path: Path) -> None:
    captured(tmp_path / "kept", "one")
    (tmp_path / "kept" / "acme-a1-bfloat16-one.json").rename(tmp_path / "kept" / "own.json")
    captured(tmp_path / "kept", "one")
    assert set(cells_of(tmp_path)) == {("one", "bfloat16"), ("one (own)", "bfloat16")}


def test_a_broken_file_does_not_stop_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    captured(tmp_path / "kept", "one")
    broken = tmp_path / "kept" / "broken.json"
    broken.write_text("{")
    with pytest.raises(typer.Exit) as raised:
        page([tmp_path / "kept"], runs=tmp_path, output=tmp_path / "page.html")
    assert raised.value.exit_code == 3
    assert (tmp_path / "page.html").is_file()
    left_out, *_, counted = capsys.readouterr().err.splitlines()
    assert counted == "cells: 1 unseen"
    assert left_out.startswith(f"left out: {broken}: not JSON: ")
    with pytest.raises(typer.Exit) as raised:
        page([broken], runs=tmp_path, output=tmp_path / "none.html")
    assert raised.value.exit_code == 3
    assert not (tmp_path / "none.html").exists()


def test_two_files_of_equal_inputs_are_refused(tmp_path: Path) -> None:
    for folder in ("kept", "other"):
        captured(tmp_path / folder, "one")
    folders = [tmp_path / "kept", tmp_path / "other"]
    with pytest.raises(UsageError, match="are of one model, machine and inputs"):
        collect_cells(
            read_files(folders)[0], tmp_path / "runs", tmp_path / "page.html", datetime.now(UTC)
        )


def test_files_of_other_inputs_have_their_own_rows(tmp_path: Path) -> None:
    chat = expectation().key.content.settings.model_copy(update={"chat": True})
    captured(tmp_path / "plain", "one")
    captured(tmp_path / "chat", "one", settings=chat)
    captured(tmp_path / "short", "one", prompts_hash="0123456789")
    folders = [tmp_path / name for name in ("plain", "chat", "short")]
    page = tmp_path / "page.html"
    cells = collect_cells(read_files(folders)[0], tmp_path / "runs", page, NOW)
    assert [cell.model for cell in cells] == ["one", "one (chat)", "one (inputs 01234567)"]
    text = write_page(cells, "2026-07-11", page).read_text()
    for cell in cells:
        assert f'href="#{cell.file}"' in text
        assert f'id="{cell.file}"' in text


def test_page_shows_states_reasons_and_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = captured(tmp_path / "kept", "one<two")
    passed = captured(tmp_path / "kept", "one", "float32", None)
    verdict_about(passed, tmp_path / "runs", "2", Outcome.PASS)
    verdict_about(one, tmp_path / "runs", "1", Outcome.FAIL, reason="logits-whole is 9x")
    git = ["git", "-c", "user.name=Ada", "-c", "user.email=ada@example.org"]
    environment = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull}
    for words in (["init", "-q"], ["add", "kept"], ["commit", "-qm", "kept: after the new driver"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True, env=environment)

    cells = collect_cells(
        read_files([tmp_path / "kept"])[0], tmp_path / "runs", tmp_path / "page.html", NOW
    )
    page = write_page(cells, "2026-07-11", tmp_path / "page.html").read_text()

    assert (
        '<span class="fail">1 fail</span>, <span class="missing">2 missing</span>, <span class="pass">1 pass</span>'
        in page
    )
    assert 'href="runs/1/report.html"' in page
    assert "logits-whole is 9x" in page
    assert "<td>Ada</td><td>kept: after the new driver</td>" in page
    assert "one&lt;two" in page
    assert (
        "captured 2026-07-01T09:30, approved by Ada, as the file says; reason: a new driver" in page
    )
    approve = (
        f"--output {tmp_path}/kept/acme-a1-float32-bfloat16-one.json --approved-by NAME</code>"
    )
    assert (
        f"not approved; to approve it: <code>assay expect capture one --run acme/bfloat16 {approve}"
        "; reason: a new driver</p>" in page
    )


MADE = expectation()
PROVENANCE = MADE.provenance.model_copy(
    update={
        "approved_by": "Ada",
        "reason": "a new driver",
        "container": "image@sha256",
        "process": {"date": "2026-02-01", "cpu": "C", "variables": {"OMP_NUM_THREADS": "4"}},
    }
)
BEFORE = MADE.model_copy(update={"provenance": PROVENANCE})
AFTER = dict(poisoned(BEFORE))


def test_every_free_text_is_poisoned() -> None:
    assert len(AFTER) > 20
    assert {path.partition(".")[0] for path in AFTER} >= {"model", "provenance", "key"}


@pytest.mark.parametrize("path", AFTER)
def test_text_of_an_expectation_is_harmless(path: str, tmp_path: Path) -> None:
    after: Expectation = AFTER[path]
    for pair in ((BEFORE, after), (after, BEFORE), (after, after)):
        try:
            change = find_change(*pair)
        except UsageError as error:
            assert_harmless_text(escape_output(str(error)))
        else:
            assert_harmless_markdown(change_as_markdown(*pair, change))
    file = write_expectation(after, tmp_path / "kept" / "x.json")
    cells = collect_cells(
        read_files([file])[0], tmp_path / "runs", tmp_path / "p.html", datetime.now(UTC)
    )
    assert_harmless_html(write_page(cells, "2026-07-11", tmp_path / "p.html").read_text())
