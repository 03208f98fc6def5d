"""Damaged tensor files: the comparison names them and does not pass."""

import shutil
from pathlib import Path

import pytest
import torch

from assay.dumps.protocol import DumpError
from assay.offline.check import CompareOptions, compare_dumps
from assay.runs import SilentProgress
from assay.verdicts import Outcome
from packages.core.tests.unit.offline.memory_dump import damaged, make_dump
from packages.core.tests.unit.offline.small_dumps import judge, write


@pytest.mark.parametrize("side", ["expected", "actual"])
def test_damaged_file_forbids_a_pass(side: str, tmp_path: Path) -> None:
    sound = write(tmp_path / "sound")
    files = sorted(sound.rglob("*.pt"))[::4]
    assert len(files) > 12
    for number, file in enumerate(files):
        spoiled = tmp_path / f"damaged-{number}"
        shutil.copytree(sound, spoiled)
        (spoiled / file.relative_to(sound)).write_bytes(file.read_bytes()[:100])
        both = (spoiled, sound) if side == "expected" else (sound, spoiled)

        verdict = judge(*both, tmp_path / f"run-{number}")

        assert verdict.verdict is Outcome.NOT_COMPARED, file.name
        assert file.name in str(verdict.levels["completeness"].reason) + str(verdict.unmatched)


@pytest.mark.parametrize("side", ["golden", "mine"])
def test_damaged_logits_forbid_a_pass_by_norms(tmp_path: Path, side: str) -> None:
    golden, mine = write(tmp_path / "golden"), write(tmp_path / "mine")
    next((tmp_path / side).rglob("*lm_head*output.0.pt")).write_text("not a tensor")
    verdict = judge(golden, mine, tmp_path / "out", stats=True)
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert "lm_head" in str(verdict.levels["completeness"].reason)


def test_one_damaged_side_of_a_near_tie_is_not_a_pass() -> None:
    """A near tie looks like a fault without the logits of both sides."""

    def generation(second: int) -> dict[tuple[str, str, int], torch.Tensor]:
        logits = torch.zeros(1, 2, 8)
        logits[0, :, second] = 1.0
        return {
            ("embed", "input.0", 0): torch.tensor([[1, 2]]),
            ("lm_head", "output", 0): logits,
            ("embed", "input.0", 1): torch.tensor([[second]]),
            ("lm_head", "output", 1): logits[:, :1],
        }

    actual = damaged(make_dump(generation(4)), "lm_head.output.0")
    found = compare_dumps(
        CompareOptions("", ""), make_dump(generation(3)), actual, SilentProgress()
    )
    assert found.verdict.levels["tokens"].verdict is Outcome.NOT_COMPARED
    assert not found.verdict.passed


def test_a_damaged_mask_that_actual_lacks_forbids_a_pass() -> None:
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool).tril()
    whole = {
        ("embed", "input.0", 0): torch.tensor([[1, 2]]),
        ("attn", "input.hidden_states", 0): torch.ones(1, 2, 8),
        ("attn", "input.attention_mask", 0): mask,
        ("attn", "output", 0): torch.ones(1, 2, 8),
    }
    expected = make_dump(whole)
    actual = make_dump({key: one for key, one in whole.items() if "mask" not in key[1]})
    for dump, outcome in (
        (expected, Outcome.PASS),
        (damaged(expected, "attn.input.attention_mask.0"), Outcome.NOT_COMPARED),
    ):
        found = compare_dumps(CompareOptions("", ""), dump, actual, SilentProgress())
        assert found.verdict.verdict is outcome


def test_a_dump_without_any_tensor_file_is_one_error(tmp_path: Path) -> None:
    golden, mine = write(tmp_path / "golden"), write(tmp_path / "mine")
    for file in mine.rglob("*.pt"):
        file.unlink()
    with pytest.raises(DumpError, match=r"mine holds no tensor: .* is missing, .* and \d+ more$"):
        judge(golden, mine, tmp_path / "out")
