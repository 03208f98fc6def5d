from pathlib import Path
from typing import Any

import pytest
import torch

from assay.files import UnreadableFileError
from assay.training.state.files import fingerprint, read_state, write_state

SHARED = torch.arange(4.0)
STATE: dict[str, Any] = {
    "optimizer": {
        "state": {0: {"step": torch.tensor(3.0), "moment": torch.ones(2, 2, dtype=torch.bfloat16)}},
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "fused": None, "params": [0, 1]}],
    },
    "shared": [SHARED, SHARED],
    "view": torch.arange(6.0).reshape(2, 3).T,
    "empty": {},
    "none": [],
    "count": 7,
}


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    write_state(tmp_path / "trainer", STATE)
    back = read_state(tmp_path / "trainer")
    assert fingerprint(back) == fingerprint(STATE)
    group = back["optimizer"]["param_groups"][0]
    assert group == STATE["optimizer"]["param_groups"][0]
    assert isinstance(group["betas"], tuple)
    assert list(back["optimizer"]["state"]) == [0]
    assert back["optimizer"]["state"][0]["moment"].dtype == torch.bfloat16
    assert torch.equal(back["view"], STATE["view"])
    assert (back["empty"], back["none"], back["count"]) == ({}, [], 7)


def test_no_pickle_is_written(tmp_path: Path) -> None:
    write_state(tmp_path / "trainer", STATE)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "trainer.json",
        "trainer.safetensors",
    ]


def test_a_fingerprint_names_each_leaf() -> None:
    state = {"a": {0: torch.zeros(1)}, "b": (1, [2]), "c": [{"d": 3}], "e": [torch.zeros(1)]}

    assert list(fingerprint(state)) == ["a.0", "b", "c.0.d", "e.0"]


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([-0.0]),
        torch.tensor([0.0], dtype=torch.float64),
        torch.tensor([[0.0]]),
        torch.tensor([1e-45]),
        0.0,
    ],
    ids=["sign-of-zero", "dtype", "shape", "one-bit", "no-tensor"],
)
def test_a_fingerprint_sees_every_bit(other: object) -> None:
    assert fingerprint({"x": torch.tensor([0.0])}) == fingerprint({"x": torch.tensor([0.0])})
    assert fingerprint({"x": torch.tensor([0.0])}) != fingerprint({"x": other})


@pytest.mark.parametrize("file", ["trainer.json", "trainer.safetensors"])
def test_a_state_cut_short_is_an_error_that_names_it(tmp_path: Path, file: str) -> None:
    write_state(tmp_path / "trainer", STATE)
    content = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(UnreadableFileError, match=r"trainer\.\w+: "):
        read_state(tmp_path / "trainer")


def test_an_absent_state_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFileError, match=r"trainer\.\w+: "):
        read_state(tmp_path / "trainer")
