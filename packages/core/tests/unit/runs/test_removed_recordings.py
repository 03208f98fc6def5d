from pathlib import Path

import pytest

from assay.runs.results import remove_recordings
from assay.sites import KeptFiles


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ("full", {"golden/a", "candidate/rank-0/b", "candidate/rank0.log", "checkpoint/c", "operations-x/d"}),
        ("replay", {"golden/a", "candidate/rank0.log"}),
        ("verdict", {"candidate/rank0.log"}),
    ],
)  # fmt: skip
def test_what_is_not_kept_is_removed_and_logs_stay(
    tmp_path: Path, keep: KeptFiles, kept: set[str]
) -> None:
    for name in (
        "golden/a",
        "candidate/rank-0/b",
        "candidate/rank0.log",
        "checkpoint/c",
        "operations-x/d",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "verdict.json").touch()

    remove_recordings(tmp_path, keep)

    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == kept | {"verdict.json"}


def test_candidate_without_logs_is_removed_whole(tmp_path: Path) -> None:
    (tmp_path / "candidate" / "attachments").mkdir(parents=True)
    (tmp_path / "candidate" / "index.jsonl").touch()

    remove_recordings(tmp_path, "replay")

    assert list(tmp_path.iterdir()) == []
