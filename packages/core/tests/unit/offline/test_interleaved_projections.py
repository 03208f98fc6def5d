"""Fused projections whose parts are interleaved by head, or value by value."""

import pytest
import torch
from torch import Tensor

from assay.dumps.protocol import Dump
from assay.offline.check import CompareOptions, compare_dumps
from assay.runs import SilentProgress
from assay.verdicts import Outcome
from packages.core.tests.unit.offline.memory_dump import make_dump

WIDTH = 12
# By fused module, its parts with their widths, and the number of interleaved groups.
FUSED = {
    "qkv": ({"q": 24, "k": 12, "v": 12}, 3),
    "packed": ({"q": 24, "k": 12, "v": 12}, 1),
    "gate_up": ({"gate": 16, "up": 16}, 16),
}


def projections(parts: dict[str, int]) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 5, WIDTH, generator=generator)
    return hidden, {
        name: torch.randn(width, WIDTH, generator=generator) for name, width in parts.items()
    }


def split(parts: dict[str, int]) -> Dump:
    hidden, weights = projections(parts)
    values = {("embed", "input.input_ids", 0): torch.arange(5)[None]}
    for name, weight in weights.items():
        values[f"a.{name}", "input.0", 0] = hidden
        values[f"a.{name}", "parameter.weight", 0] = weight
        values[f"a.{name}", "output", 0] = hidden @ weight.T
    return make_dump(values)


def fused(name: str, fault: str = "") -> Dump:
    """Return the dump of a fused projection. fault: a part whose result is 2% too large."""
    parts, groups = FUSED[name]
    hidden, weights = projections(parts)
    rows = [weight.unflatten(0, (groups, -1)) for weight in weights.values()]
    scales = [
        torch.full(one.shape[:2], 1.02 if part == fault else 1.0)
        for part, one in zip(parts, rows, strict=True)
    ]
    weight, scale = torch.cat(rows, 1).flatten(0, 1), torch.cat(scales, 1).flatten()
    return make_dump(
        {
            ("embed", "input.input_ids", 0): torch.arange(5)[None],
            (f"a.{name}", "input.0", 0): hidden,
            (f"a.{name}", "parameter.weight", 0): weight,
            (f"a.{name}", "output", 0): hidden @ weight.T * scale,
        }
    )


@pytest.mark.parametrize("name", FUSED)
def test_parts_agree_in_both_directions(name: str) -> None:
    whole, parts = fused(name), split(FUSED[name][0])
    for sides in ((parts, whole), (whole, parts)):
        verdict = compare_dumps(CompareOptions("a", "b"), *sides, SilentProgress()).verdict
        assert verdict.verdict is Outcome.PASS, str(verdict.levels)
        assert verdict.compared == 1 + 3 * len(FUSED[name][0])


@pytest.mark.parametrize("name", FUSED)
def test_a_wrong_part_is_named(name: str) -> None:
    part = list(FUSED[name][0])[1]
    expected, actual = split(FUSED[name][0]), fused(name, fault=part)
    verdict = compare_dumps(CompareOptions("a", "b"), expected, actual, SilentProgress()).verdict
    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert verdict.location.module == f"a.{part}"
