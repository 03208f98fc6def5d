"""Results that one side joins: interleaved projections, rotary layouts, residual sums."""

import pytest
import torch
from torch import Tensor

from assay.comparison.check import Compared, CompareOptions, compare_dumps
from assay.dumps.protocol import Dump
from assay.runs import SilentProgress
from assay.verdicts import Outcome, Verdict
from packages.core.tests.unit.comparison.memory_dump import make_dump

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


Values = dict[tuple[str, str, int], Tensor]
LAYERS = ("layers.0", "layers.1", "layers.2")


def states() -> list[tuple[Tensor, Tensor]]:
    """Return hidden state and residual after each layer, and before the first."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(1, 5, 8, generator=generator), torch.randn(1, 5, 8, generator=generator))
        for _ in range(len(LAYERS) + 1)
    ]


def normed(value: Tensor) -> Tensor:
    return value / value.square().mean(-1, keepdim=True).sqrt()


def model() -> Dump:
    values: Values = {("embed", "input.input_ids", 0): torch.arange(5)[None]}
    before, *after = (hidden + residual for hidden, residual in states())
    for layer, value in zip(LAYERS, after, strict=True):
        values[f"{layer}.norm", "input.0", 0] = before
        values[f"{layer}.norm", "output", 0] = normed(before)
        values[layer, "input.hidden_states", 0] = before
        values[layer, "output", 0] = before = value
    return make_dump(values)


def engine(error: float = 0.0, *, flat: bool = False) -> Dump:
    """Return the dump of an engine. error: relative error of the second layer's hidden state."""
    values: Values = {("embed", "input.input_ids", 0): torch.arange(5)[None]}
    before, *after = states()
    for layer, (hidden, residual) in zip(LAYERS, after, strict=True):
        values[f"{layer}.norm", "input.0", 0], values[f"{layer}.norm", "input.1", 0] = before
        values[f"{layer}.norm", "output.0", 0] = normed(before[0] + before[1])
        values[f"{layer}.norm", "output.1", 0] = before[0] + before[1]
        values[layer, "input.hidden_states", 0], values[layer, "input.residual", 0] = before
        before = hidden * (1 + error * (layer == LAYERS[1])), residual
        values[layer, "output.0", 0], values[layer, "output.1", 0] = before
    if flat:
        values = {key: value[0] for key, value in values.items()}
    return make_dump(values)


def compare(expected: Dump, actual: Dump) -> Compared:
    return compare_dumps(CompareOptions("a", "b"), expected, actual, SilentProgress())


@pytest.mark.parametrize("flat", [False, True])
def test_sums_agree_whichever_side_keeps_them_apart(flat: bool) -> None:
    verdict = compare(model(), engine(flat=flat)).verdict
    assert verdict.verdict is Outcome.PASS, verdict.unmatched
    assert any("ACTUAL keeps hidden states and residuals apart" in one for one in verdict.notes)
    assert verdict.compared == 13

    verdict = compare(engine(flat=flat), model()).verdict
    # The model has no second result of its norms.
    assert verdict.unmatched.expected == [f"{layer}.norm:output.1" for layer in LAYERS]
    assert str(verdict.headline).startswith("Everything with a partner agrees (13 tensors)")


def test_both_sides_apart_are_compared_as_they_are() -> None:
    verdict = compare(engine(), engine()).verdict
    assert verdict.verdict is Outcome.PASS
    assert verdict.notes == compare(model(), model()).verdict.notes


def test_a_wrong_hidden_state_is_found_in_its_layer() -> None:
    verdict = compare(model(), engine(0.02)).verdict
    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert verdict.location.module == "layers.1"


HEADS = {"q_proj": 4, "k_proj": 2, "v_proj": 2}
HEAD_DIM, ROTARY_WIDTH = 8, 32


def make_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"layers.{layer}.{name}": torch.randn(heads * HEAD_DIM, ROTARY_WIDTH, generator=generator)
        for layer in range(2)
        for name, heads in HEADS.items()
    }


def as_neighbors(weight: Tensor) -> Tensor:
    """Move channel i of the second half of each head behind channel i of the first half."""
    heads = weight.view(-1, 2, HEAD_DIM // 2, ROTARY_WIDTH)
    return heads.transpose(1, 2).reshape(weight.shape)


def reorder(weights: dict[str, Tensor], *kept: str) -> dict[str, Tensor]:
    """Reorder all queries and keys but those of the modules in `kept`."""
    return {
        name: as_neighbors(one) if name[-6] in "qk" and name not in kept else one.clone()
        for name, one in weights.items()
    }


def judge(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> Verdict:
    one, other = (
        make_dump({(name, "parameter.weight", 0): value for name, value in side.items()})
        for side in (expected, actual)
    )
    return compare_dumps(CompareOptions("e", "a"), one, other, SilentProgress()).verdict


def test_heads_in_the_other_order_are_a_doubt_in_either_direction() -> None:
    weights = make_weights()
    for sides in ((weights, reorder(weights)), (reorder(weights), weights)):
        verdict = judge(*sides)

        assert verdict.verdict is Outcome.NOT_COMPARED
        assert verdict.levels["weights"].verdict is Outcome.PASS
        reason = verdict.levels["completeness"].reason or ""
        assert reason.startswith("weights alone do not show which order of channels")
        assert any("rotary embedding" in note for note in verdict.notes)


@pytest.mark.parametrize("module", ["layers.1.q_proj", "layers.0.k_proj", "layers.0.v_proj"])
def test_a_wrong_row_among_reordered_heads_is_named(module: str) -> None:
    wrong = reorder(make_weights())
    wrong[module][5] *= 1.1
    verdict = judge(make_weights(), wrong)

    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert verdict.location.module == module


@pytest.mark.parametrize("kept", ["layers.0.k_proj", "layers.1.q_proj"])
def test_queries_and_keys_of_different_orders_fail(kept: str) -> None:
    verdict = judge(make_weights(), reorder(make_weights(), kept))

    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert (verdict.location.module or "").startswith(kept[:8])


def test_reordered_values_are_wrong() -> None:
    weights = make_weights()
    wrong = weights | {"layers.0.v_proj": as_neighbors(weights["layers.0.v_proj"])}

    assert judge(weights, wrong).verdict is Outcome.FAIL
