"""Checkpoints found by the pattern of their paths."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from assay.runs import SilentProgress
from assay_smoke.external.runs import (
    Cycle,
    find_checkpoints,
    find_split_dependence,
    only_shrinks,
    saved_of,
)


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


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("config.json", '{"attention_dropout": 0.0, "resid_pdrop": 0.1}', "resid_pdrop 0.1"),
        ("config.json", '{"attention_dropout": 0, "hidden_dropout_prob": null}', None),
        ("config.json", '{"text_config": {"dropout": 5e-2}}', "dropout 5e-2"),
        ("config.json", '{"output_router_logits": true}', "output_router_logits true"),
        ("config.json", '{"output_router_logits": false, "num_layers": 2}', None),
        ("adapter_config.json", '{"lora_dropout": 0.1}', "lora_dropout 0.1"),
        ("other.json", '{"lora_dropout": 0.1}', None),
    ],
)
def test_what_depends_on_the_split_by_design_is_read_from_the_configuration(
    tmp_path: Path, name: str, text: str, found: str | None
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")

    assert find_split_dependence(tmp_path) == found


@pytest.mark.parametrize(
    ("after", "shrinks"),
    [
        ([0.5, -1.0], True),
        ([0.5, -2.0], True),  # the second one is frozen
        ([0.0, -1.0], True),
        ([1.0, -2.0], False),  # nothing moved, which is another fault
        ([0.5, -2.5], False),
        ([-0.5, -1.0], False),  # decay keeps the sign
        ([float("nan"), -1.0], False),
    ],
)
def test_weight_decay_alone_moves_no_element_away_from_zero(
    after: list[float], shrinks: bool
) -> None:
    before = {"a": torch.tensor([1.0, -2.0])}

    assert only_shrinks({"a": torch.tensor(after)}, before) is shrinks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_after_weight_decay_moves_no_element_away_from_zero(dtype: torch.dtype) -> None:
    before = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    after = before.clone()
    for _ in range(3):
        after.mul_(1 - 1e-2)

    assert only_shrinks({"a": after}, {"a": before})


@pytest.mark.parametrize(
    ("dtypes", "precision", "note"),
    [
        (["bfloat16", "bfloat16"], "float32", "checkpoints are bfloat16, with fewer digits than `precision`, float32"),
        (["float16", "bfloat16"], "float32", "checkpoints are float16, with fewer digits than `precision`, float32"),
        (["float16", "bfloat16"], "float16", ""),
        (["bfloat16", "float32"], "float32", ""),
        (["bfloat16", "bfloat16"], "bfloat16", ""),
        (["float32", "float32"], "bfloat16", ""),
        (["bfloat16", "bfloat16"], None, ""),
    ],
)  # fmt: skip
def test_a_checkpoint_that_loses_digits_is_noted(
    dtypes: list[str], precision: str | None, note: str
) -> None:
    tensors = {name: torch.ones(1, dtype=getattr(torch, name)) for name in dtypes}
    tensors["position"] = torch.ones(1, dtype=torch.int64)
    run: Any = SimpleNamespace(library=SimpleNamespace(precision=precision))
    cycle = Cycle(run, SilentProgress(), saved={3: saved_of(3, tensors)})
    assert cycle.narrowing == note
