from pathlib import Path

import pytest

from assay.errors import UsageError
from assay.files import seal
from assay_bench.tuning.records import (
    LOSSES_FILE,
    checkpoint_folder,
    go_back_to_checkpoint,
    model_folder,
    read_tunings,
)


def write(tuning: Path, *, checkpoints: list[str], losses: bytes) -> None:
    for name in checkpoints:
        checkpoint_folder(tuning, name).mkdir(parents=True)
    tuning.mkdir(exist_ok=True)
    (tuning / LOSSES_FILE).write_bytes(losses)


def test_tuning_restores_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    # Killed during the write of the fifth line or of the next checkpoint.
    write(tmp_path, checkpoints=["2", "4", "part"], losses=b"0\n1\n2\n3\n4")
    assert go_back_to_checkpoint(tmp_path) == 4
    assert (tmp_path / LOSSES_FILE).read_bytes() == b"0\n1\n2\n3\n"
    assert [path.name for path in checkpoint_folder(tmp_path, 4).parent.iterdir()] == ["4"]


def test_checkpoints_are_compared_as_numbers(tmp_path: Path) -> None:
    write(tmp_path, checkpoints=["9", "10"], losses=b"x\n" * 10)
    assert go_back_to_checkpoint(tmp_path) == 10


@pytest.mark.parametrize(
    ("checkpoints", "losses"), [([], b"0\n1\n"), (["part"], b"0\n"), (["4"], b"0\n1\n")]
)
def test_tuning_restarts_if_losses_before_the_checkpoint_are_missing(
    tmp_path: Path, checkpoints: list[str], losses: bytes
) -> None:
    write(tmp_path, checkpoints=checkpoints, losses=losses)
    assert go_back_to_checkpoint(tmp_path) == 0
    assert (tmp_path / LOSSES_FILE).read_bytes() == b""


def test_new_tuning_has_no_checkpoint(tmp_path: Path) -> None:
    assert go_back_to_checkpoint(tmp_path) == 0


@pytest.mark.parametrize(
    ("model", "name"),
    [("micro:llama?trained=0", "micro-llama-trained-0"), ("/data/my model", "data-my-model")],
)
def test_model_names_its_folder(tmp_path: Path, model: str, name: str) -> None:
    assert model_folder(tmp_path, model) == tmp_path / name


def test_folder_without_a_finished_tuning_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        read_tunings(tmp_path)
    assert str(raised.value) == f"{tmp_path} has no finished tuning of `assay bench tune`"


def test_damaged_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "micro-llama/full/seed-0/tuning.json"
    path.parent.mkdir(parents=True)
    path.write_text(seal({"schema": 1}))
    with pytest.raises(UsageError) as raised:
        read_tunings(tmp_path)
    assert str(raised.value) == f"{path}: recipe: Field required"
