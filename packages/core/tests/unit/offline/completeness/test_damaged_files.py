"""Damaged tensor files: whatever a file holds, the comparison names it and does not pass."""

import shutil
from pathlib import Path

import pytest

from assay.verdicts import Outcome
from packages.core.tests.unit.offline.small_dumps import judge, write


@pytest.mark.parametrize("side", ["expected", "actual"])
def test_damaged_file_forbids_a_pass(side: str, tmp_path: Path) -> None:
    sound = write(tmp_path / "sound")
    files = sorted(sound.rglob("*.pt"))[::4]
    assert len(files) > 12
    for number, file in enumerate(files):
        damaged = tmp_path / f"damaged-{number}"
        shutil.copytree(sound, damaged)
        (damaged / file.relative_to(sound)).write_bytes(file.read_bytes()[:100])
        both = (damaged, sound) if side == "expected" else (sound, damaged)

        verdict = judge(*both, tmp_path / f"run-{number}")

        assert verdict.verdict is Outcome.NOT_COMPARED, file.name
        assert file.name in str(verdict.levels["completeness"].reason) + str(verdict.unmatched)
