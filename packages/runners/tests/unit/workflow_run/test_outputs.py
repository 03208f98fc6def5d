from pathlib import Path

import pytest

from assay_runners.workflow_run.outputs import add_to_summary, write_outputs


def test_nothing_is_written_outside_a_workflow_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_outputs({"a": "b"}, {})
    add_to_summary("text", {})
    assert list(tmp_path.iterdir()) == []


def test_an_output_of_several_lines_is_refused(tmp_path: Path) -> None:
    # A second line would be another output.
    file = tmp_path / "output"
    with pytest.raises(ValueError, match="the output a has several lines"):
        write_outputs({"a": "1\nmachines=[]"}, {"GITHUB_OUTPUT": str(file)})
    assert not file.exists()


def test_a_summary_over_githubs_limit_is_cut_with_a_note(tmp_path: Path) -> None:
    file = tmp_path / "summary"
    for text in ("first", "ü" * 600_000, "last"):
        add_to_summary(text, {"GITHUB_STEP_SUMMARY": str(file)})
    assert file.stat().st_size < 1024 * 1024
    read = file.read_text(encoding="utf-8", errors="replace")
    assert read.startswith("first\n\nüüü")
    assert "the rest is in the artifacts" in read
