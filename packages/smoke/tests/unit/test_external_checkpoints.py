"""Checkpoints by the pattern of their paths."""

from pathlib import Path

import pytest

from assay_smoke.external.checkpoints import find_checkpoints


@pytest.mark.parametrize(
    ("pattern", "folders", "found"),
    [
        ("step-{step}", ["step-10", "step-9", "step-x", "other"], [9, 10]),
        ("step-{step}", ["step-0003", "step-3-optimizer"], [3]),
        ("*/epoch_{step}", ["a/epoch_0", "b/epoch_1"], [0, 1]),
        ("{step}/model-{step}", ["1/model-1", "2/model-1"], [1]),
        ("[x] {step}", ["[x] 4", "x 5"], [4]),
        ("step-{step}", [], []),
    ],
)
def test_checkpoints_are_found_by_their_step(
    tmp_path: Path, pattern: str, folders: list[str], found: list[int]
) -> None:
    for name in folders:
        (tmp_path / name).mkdir(parents=True)

    assert list(find_checkpoints(f"{tmp_path}/{pattern}")) == found
