"""Two folders: sound weights of every format are no finding, each planted fault is named."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.models.quantization.results import WeightComparison, WeightRegion
from packages.core.tests.unit.models.quantization.rounding import (
    Case,
    Fault,
    Tensors,
    no_fault,
    swap,
    times,
    zero_plus_one,
)
from packages.core.tests.unit.models.quantization.writers import (
    CASES,
    compare_folders,
    write_folder,
)

NAMES = ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.up_proj"]
FAULTY = "model.layers.0.mlp.down_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
# With 2 bits, one scale that is a tenth too large cannot be told from rounding.
COARSE = "gptq2-256"

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
grouped = pytest.mark.parametrize(
    "case", [one for one in CASES.values() if one.num_groups > 1], ids=lambda case: case.name
)
shifted = pytest.mark.parametrize(
    "case", [one for one in CASES.values() if one.has_zeros], ids=lambda case: case.name
)


def make_weights(seed: int) -> dict[str, Tensor]:
    """Groups of 64 columns have different sizes, and so different scales."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(32, 1, generator=generator) + 0.5
    sizes = sizes * (torch.rand(1, 4, generator=generator) + 0.5).repeat_interleave(64, 1)
    return {name: torch.randn(32, 256, generator=generator) * 0.02 * sizes for name in NAMES}


def write_expected(folder: Path, weights: dict[str, Tensor]) -> Path:
    stored = {f"{name}.weight": weight for name, weight in weights.items()}
    return write_folder(folder, [stored | {NORM: torch.linspace(0.5, 1.5, 256)}])


def write_actual(folder: Path, case: Case, weights: dict[str, Tensor], fault: Fault) -> Path:
    """Two shards: layer 0, and layer 1 with its norm."""
    shards: list[Tensors] = [{}, {NORM: torch.linspace(0.5, 1.5, 256)}]
    for name, weight in weights.items():
        tensors, _ = case.write(weight, fault if f"{name}.weight" == FAULTY else no_fault)
        shards[name == NAMES[2]] |= {f"{name}.{part}": one for part, one in tensors.items()}
    return write_folder(folder, shards, case.settings)


def compare(folder: Path, case: Case, fault: Fault = no_fault) -> WeightComparison:
    weights = make_weights(0)
    expected = write_expected(folder / "expected", weights)
    return compare_folders(expected, write_actual(folder / "actual", case, weights, fault))


def where(place: WeightRegion | None) -> tuple[int, int] | None:
    return (place.rows[0], place.columns[0]) if place else None


@every_case
def test_sound_weights_are_no_finding(case: Case, tmp_path: Path) -> None:
    found = compare(tmp_path, case)
    assert not found.findings
    assert (len(found.results), found.unmatched_expected, found.unmatched_actual) == (4, (), ())
    # A power of two is up to twice the scale that just covers a group, one of fp8 may clip.
    assert max(one.worst_ratio for one in found.results) < (2.6 if case.factor == 2 else 1.6)
    assert [one.error for one in found.results if one.name == NORM] == [0.0]


@every_case
def test_one_wrong_scale_is_named_with_its_factor(case: Case, tmp_path: Path) -> None:
    factor = 1.5 if case.name == COARSE else case.factor
    found = compare(tmp_path, case, times(factor, case.group))
    assert [(one.cause, one.weight) for one in found.findings] == [("scale", FAULTY)]
    finding = found.findings[0]
    assert finding.amount == pytest.approx(factor, rel=0.3 if case.name == COARSE else 0.06)
    assert finding.error > finding.best
    assert where(finding.place) == (None if case.num_groups == 1 else case.corner(case.group))


def test_a_wrong_scale_that_cannot_be_seen_is_below_the_resolution(tmp_path: Path) -> None:
    found = compare(tmp_path, CASES[COARSE], times(1.1, 3))
    assert not found.findings
    assert next(one.resolution for one in found.results if one.name == FAULTY) > 0.1


@shifted
def test_one_zero_point_that_is_off_by_one_is_named(case: Case, tmp_path: Path) -> None:
    found = compare(tmp_path, case, zero_plus_one(case.group))
    assert [(one.cause, one.weight) for one in found.findings] == [("zero-point", FAULTY)]
    assert found.findings[0].amount == pytest.approx(1, abs=0.02)
    assert where(found.findings[0].place) == case.corner(case.group)


@grouped
def test_swapped_groups_name_each_other(case: Case, tmp_path: Path) -> None:
    found = compare(tmp_path, case, swap(1, 4))
    assert {(one.cause, one.weight) for one in found.findings} == {("swapped", FAULTY)}
    pairs = {(where(one.place), where(one.partner)) for one in found.findings}
    here, there = case.corner(1), case.corner(4)
    assert pairs == {(here, there), (there, here)}


@every_case
def test_stale_shard_is_named_once(case: Case, tmp_path: Path) -> None:
    weights, stale = make_weights(0), make_weights(1)
    mixed = {name: (weights if name == NAMES[2] else stale)[name] for name in NAMES}
    expected = write_expected(tmp_path / "expected", weights)
    found = compare_folders(expected, write_actual(tmp_path / "actual", case, mixed, no_fault))
    assert [(one.cause, one.weight, one.amount) for one in found.findings] == [
        ("shard", "model-00001-of-00002.safetensors", 2)
    ]


def test_scale_and_zero_point_of_two_groups_exchanged(tmp_path: Path) -> None:
    def exchange(rounded: Any) -> None:
        for per_group in (rounded.scales, rounded.zeros):
            flat = per_group.view(-1)
            flat[[1, 4]] = flat[[4, 1]]

    found = compare(tmp_path, CASES["gptq8-64"], exchange)
    assert {one.cause for one in found.findings} == {"swapped-parameters"}
    assert {where(one.partner) for one in found.findings} == {(0, 64), (1, 0)}


def test_every_zero_point_off_by_one_is_one_finding(tmp_path: Path) -> None:
    """As where a file of the second version of GPTQ's format is read as one of the first."""
    case = CASES["gptq4-64"]
    weights = make_weights(0)
    actual = write_actual(tmp_path / "actual", case, weights, no_fault)
    config = actual / "config.json"
    config.write_text(config.read_text().replace('"gptq"}', '"gptq_v2"}'))
    found = compare_folders(write_expected(tmp_path / "expected", weights), actual)
    assert {(one.cause, one.place) for one in found.findings} == {("zero-point", None)}
    assert [one.amount for one in found.findings] == [pytest.approx(-1, abs=0.02)] * 3


def test_every_scale_too_large_is_one_finding(tmp_path: Path) -> None:
    def enlarge(rounded: Any) -> None:
        rounded.scales *= 1.1

    [finding] = compare(tmp_path, CASES["gptq4-64"], enlarge).findings
    assert (finding.cause, finding.place) == ("scale", None)
    assert finding.amount == pytest.approx(1.1, rel=0.02)


def test_nan_in_a_scale_is_a_finding(tmp_path: Path) -> None:
    [finding] = compare(tmp_path, CASES["compressed-int8-group"], times(float("nan"), 3)).findings
    assert (finding.cause, where(finding.place)) == ("values", (0, 192))


def test_a_changed_float_weight_in_a_quantized_folder(tmp_path: Path) -> None:
    case, weights = CASES["gptq4-64"], make_weights(0)
    tensors, _ = case.write(weights[NAMES[0]], no_fault)
    stored = {f"{NAMES[0]}.{part}": one for part, one in tensors.items()}
    norm = torch.linspace(0.5, 1.5, 256)
    expected = {f"{NAMES[0]}.weight": weights[NAMES[0]], NORM: norm}
    changed = norm.clone()
    changed[7] += 1e-3
    found = compare_folders(
        write_folder(tmp_path / "expected", [expected]),
        write_folder(tmp_path / "actual", [stored | {NORM: changed}], case.settings),
    )
    [finding] = found.findings
    assert (finding.weight, finding.cause, finding.place) == (
        NORM,
        "values",
        WeightRegion(range(7, 8), ()),
    )


def test_float_weights_of_two_dtypes_may_differ_by_rounding(tmp_path: Path) -> None:
    weights = make_weights(0)
    half = {name: weight.bfloat16() for name, weight in weights.items()}
    expected = write_expected(tmp_path / "expected", weights)
    assert not compare_folders(expected, write_expected(tmp_path / "actual", half)).findings
    half[NAMES[0]] = half[NAMES[0]] * 1.05
    [finding] = compare_folders(expected, write_expected(tmp_path / "other", half)).findings
    assert finding.cause == "scale"
    assert finding.amount == pytest.approx(1.05, abs=2e-3)


def test_the_quantized_side_may_be_the_expected_one(tmp_path: Path) -> None:
    weights = make_weights(0)
    floats = write_expected(tmp_path / "floats", weights)
    case = CASES["gptq8-64"]
    quantized = write_actual(tmp_path / "quantized", case, weights, times(1.1, 3))
    [finding] = compare_folders(quantized, floats).findings
    assert (finding.weight, finding.cause) == (FAULTY, "scale")


def test_missing_weight_is_unmatched(tmp_path: Path) -> None:
    weights = make_weights(0)
    expected = write_expected(tmp_path / "expected", weights)
    del weights[NAMES[0]]
    found = compare_folders(
        expected, write_actual(tmp_path / "actual", CASES["awq"], weights, no_fault)
    )
    assert (found.unmatched_expected, found.unmatched_actual) == ((f"{NAMES[0]}.weight",), ())


def test_other_shape_is_not_compared(tmp_path: Path) -> None:
    one = write_folder(tmp_path / "one", [{"a.weight": torch.ones(4, 8)}])
    other = write_folder(tmp_path / "other", [{"a.weight": torch.ones(5, 8)}])
    found = compare_folders(one, other)
    assert found.not_compared == ("a.weight (expected (4, 8), actual (5, 8))",)
    assert not found.results


@pytest.mark.parametrize(
    "name", ["gptq4-64", "bitsandbytes-nf4", "fp8-rows", "compressed-pack4-group"]
)
def test_fused_weights_are_compared_with_their_parts(name: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    parts = {
        kind: torch.randn(rows, 256, generator=generator)
        for kind, rows in (("q", 32), ("k", 16), ("v", 16))
    }
    parent = "model.layers.0.self_attn"
    case = CASES[name]

    def stored(name: str, weight: Tensor, fault: Fault) -> Tensors:
        tensors, _ = case.write(weight, fault)
        return {f"{parent}.{name}.{part}": one for part, one in tensors.items()}

    whole = torch.cat(list(parts.values()))
    split = {f"{parent}.{kind}_proj.weight": weight for kind, weight in parts.items()}
    fused = write_folder(
        tmp_path / "fused", [stored("qkv_proj", whole, times(1.5, case.group))], case.settings
    )
    found = compare_folders(write_folder(tmp_path / "split", [split]), fused)
    names = " + ".join(split)
    assert (found.unmatched_expected, found.unmatched_actual) == ((), ())
    assert [(one.weight, one.cause) for one in found.findings] == [(names, "scale")]

    shard: Tensors = {}
    for kind, weight in parts.items():
        shard |= stored(f"{kind}_proj", weight, times(1.5, case.group) if kind == "k" else no_fault)
    actual = write_folder(tmp_path / "parts", [shard], case.settings)
    expected = write_folder(tmp_path / "whole", [{f"{parent}.qkv_proj.weight": whole}])
    found = compare_folders(expected, actual)
    assert [(one.weight, one.cause) for one in found.findings] == [
        (f"{parent}.k_proj.weight", "scale")
    ]
