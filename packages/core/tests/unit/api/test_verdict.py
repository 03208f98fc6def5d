"""A verdict as text, as HTML and as JSON."""

import errno
import io
import re
from pathlib import Path

import pytest
import typer
from rich.console import Console

from assay.api.verdict import CheckedVerdict
from assay.cli.ending import end_with
from assay.files import DiskError
from assay.report.page import html
from assay.report.run_report import read_report
from assay.report.text_formats import print_report
from packages.core.tests.unit.report.sample_runs import Sample, write_hostile_sample, write_sample

FAILED = Sample(1, 2, 18, 2, "model.layers.0.mlp.down_proj")


@pytest.fixture
def verdict(tmp_path: Path) -> CheckedVerdict:
    return CheckedVerdict.publish(write_sample(tmp_path / "run", FAILED))


def test_text_is_what_the_terminal_shows(
    verdict: CheckedVerdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    page = verdict.folder / "report.html"
    print_report(
        read_report(verdict.folder), Console(file=stream, width=100, color_system=None), page
    )
    assert str(verdict).splitlines() == [line.rstrip() for line in stream.getvalue().splitlines()]
    assert str(verdict).startswith("✗ FAIL: micro:llama on cpu/bfloat16 against cpu/float32\n")
    assert str(verdict).endswith(f"report: {page}\nNext: assay explain module-error")


def test_one_line_names_the_run_and_its_folder(verdict: CheckedVerdict, tmp_path: Path) -> None:
    assert repr(verdict) == (
        f"<FAIL: micro:llama on cpu/bfloat16 against cpu/float32; {tmp_path / 'run'}>"
    )


def test_values_and_json_are_those_of_the_file(verdict: CheckedVerdict) -> None:
    assert verdict.to_json() == read_report(verdict.folder).verdict.to_json()
    assert not verdict.passed
    assert verdict.location is not None
    assert verdict.location.module == "model.layers.0.mlp.down_proj"


def test_a_notebook_gets_the_first_screen_alone(verdict: CheckedVerdict) -> None:
    screen = verdict._repr_html_()
    text = " ".join(re.sub(r"<style>.*?</style>|<[^>]*>", " ", screen, flags=re.DOTALL).split())
    assert text.startswith(
        "✗ FAIL micro:llama on cpu/bfloat16 against cpu/float32 "
        "model.layers.0.mlp.down_proj (forward, step 0) differs from the reference."
    )
    assert "Does every part compute the same from the same inputs?" in text
    assert "<script" not in screen
    assert "id=" not in re.sub(r'id="notes"', "", screen)


def test_the_style_of_the_first_screen_stays_inside(verdict: CheckedVerdict) -> None:
    (style,) = re.findall(r"<style>(.*?)</style>", verdict._repr_html_(), re.DOTALL)
    assert style.startswith("@scope (.assay-verdict) { :scope {")
    assert style.count("{") == style.count("}")
    depths = [style[:end].count("{") - style[:end].count("}") for end in range(len(style))]
    assert min(depths[len("@scope (.assay-verdict) {") :]) >= 1


@pytest.mark.parametrize(("sample", "code"), [(FAILED, 1), (Sample(1, 2, 18, 2, None), 0)])
def test_a_command_ends_with_the_code_of_its_verdict(
    tmp_path: Path, sample: Sample, code: int
) -> None:
    verdict = CheckedVerdict.publish(write_sample(tmp_path / "run", sample))
    with pytest.raises(typer.Exit) as end:
        end_with(verdict, as_json=False)
    assert end.value.exit_code == code


def test_names_of_a_run_never_become_elements_of_a_notebook(tmp_path: Path) -> None:
    hostile = "<img src=x onerror='hacked = 1'></style>"
    verdict = CheckedVerdict.publish(write_hostile_sample(tmp_path / "run", hostile))
    assert "<img" not in verdict._repr_html_()
    assert verdict._repr_html_().count("</style>") == 1


def test_verdict_is_shown_where_there_is_no_room_for_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path, _text: str) -> Path:
        raise DiskError.refused(path, OSError(errno.ENOSPC, "No space left on device"))

    monkeypatch.setattr(html, "write_whole", refuse)
    verdict = CheckedVerdict.publish(write_sample(tmp_path / "run", FAILED))
    with pytest.raises(typer.Exit) as end:
        end_with(verdict, as_json=False)

    assert end.value.exit_code == 2
    shown = capsys.readouterr()
    assert shown.out.startswith("✗ FAIL: micro:llama on cpu/bfloat16 against cpu/float32\n")
    assert "report.html" not in shown.out
    assert shown.err == (
        f"assay: cannot write {tmp_path / 'run' / 'report.html'}: No space left on device;"
        " the verdict above is complete\n"
    )
