"""A candidate that several ranks compute together: every rank is judged."""

from pathlib import Path
from typing import Any

import pytest

Run = Any  # RunAssay of conftest.py

# Each is wrong on rank 1 alone.
FAULTS = '''
import torch
import torch.distributed as dist
from transformers.cache_utils import DynamicLayer

NORM = "model.layers.1.post_attention_layernorm"


def other_norm(model):
    """Whole on every rank, and no sum over ranks shows it."""
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.get_submodule(NORM).weight.mul_(1.02)


def other_heads(model):
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.get_submodule("model.layers.2.self_attn.k_proj").weight.mul_(1.02)


def sum_without_others(model):
    """The fifth sum over the ranks is what rank 1 put into it."""
    real, calls = dist.all_reduce, []

    def all_reduce(tensor, *args, **kwargs):
        calls.append(tensor)
        if dist.get_rank() != 1 or len(calls) % 9 != 5:
            return real(tensor, *args, **kwargs)
        own = tensor.clone()
        done = real(tensor, *args, **kwargs)
        tensor.copy_(own)
        return done

    dist.all_reduce = all_reduce


def scaled_cache(model):
    update = DynamicLayer.update

    def scaled(self, keys, values, *args, **kwargs):
        return update(self, keys, values * (1.02 if dist.get_rank() == 1 else 1), *args, **kwargs)

    DynamicLayer.update = scaled
'''


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faults") / "faults.py"
    path.write_text(FAULTS)
    return path


@pytest.mark.long
def test_a_model_divided_over_ranks_passes(check: Run) -> None:
    run = check("--mesh", "tp=2")

    assert (run.code, run.verdict["verdict"]) == (0, "PASS"), run.stdout
    assert run.verdict["candidate"]["mesh"] == {"tp": 2}
    assert run.verdict["unmatched"]["expected"] == []
    assert all(level["compared"] > 0 for level in run.verdict["levels"].values())
    assert "each of 2 ranks is judged; PASS: all" in run.verdict["notes"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "dtype", "place", "diagnosis"),
    [
        ("other_norm", "bfloat16", (1, "model.layers.1.post_attention_layernorm", "mul"), "weight-mismatch"),
        # Its ratio in the logits of both ranks is larger.
        ("other_norm", "float32", (1, "model.layers.1.post_attention_layernorm", "mul"), "weight-mismatch"),
        # Heads are put together before they are measured: every rank sees them.
        ("other_heads", "bfloat16", (0, "model.layers.2.self_attn.k_proj", "linear"), "weight-mismatch"),
        ("scaled_cache", "bfloat16", (0, "model.layers.0.self_attn", "mul"), "module-error"),
    ],
)  # fmt: skip
def test_what_is_wrong_on_one_rank_fails_at_its_operation(
    check: Run, faults: Path, fault: str, dtype: str, place: tuple[int, str, str], diagnosis: str
) -> None:
    setup = "--candidate-setup", f"{faults}:{fault}"
    run = check("--mesh", "tp=2", *setup, candidate=f"cpu/{dtype}")

    verdict = run.verdict
    assert (run.code, verdict["verdict"]) == (1, "FAIL")
    location = verdict["location"]
    assert (location["rank"], location["module"], location["op"]) == place
    assert verdict["diagnosis"] == diagnosis


def test_a_sum_that_one_rank_does_not_take_over_fails_on_that_rank(
    check: Run, faults: Path
) -> None:
    run = check("--mesh", "tp=2", "--candidate-setup", f"{faults}:sum_without_others")

    assert run.code == 1
    assert run.verdict["location"]["rank"] == 1


def test_heads_that_cannot_be_divided_are_one_message(check: Run) -> None:
    run = check("--mesh", "tp=3")

    assert run.code == 2
    assert run.stderr.splitlines()[-1].startswith("assay: 4 query heads cannot be distributed")
