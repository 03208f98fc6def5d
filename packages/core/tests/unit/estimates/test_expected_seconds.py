from pathlib import Path

from assay.estimates.expected_seconds import read_expected_seconds, write_expected_seconds


def test_expected_seconds_are_read_where_there_are_any(tmp_path: Path) -> None:
    assert read_expected_seconds(tmp_path, "cpu") == []
    write_expected_seconds(tmp_path, "cpu", [1.0, 2.5])
    assert read_expected_seconds(tmp_path, "cpu") == [1.0, 2.5]
    assert read_expected_seconds(tmp_path, "cuda") == []
    (tmp_path / "seconds.json").write_text("[")
    assert read_expected_seconds(tmp_path, "cpu") == []
