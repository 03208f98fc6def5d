"""Parts of a tensor on ranks: declared layouts and detected placements."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.comparison.check import CompareOptions, compare_dumps
from assay.comparison.measuring.pair_values import give_comparable
from assay.comparison.measuring.placed_parts import (
    Placement,
    PlacementFinder,
    PlacementRule,
    Shape,
    find_wrong_summand,
    list_errors,
    list_fused_rules,
    list_rules,
)
from assay.dumps.protocol import Dump
from assay.dumps.recognizing import open_dump
from assay.runs import SilentProgress
from assay.verdicts import Outcome, Verdict
from packages.core.tests.dump_writers import layouts
from packages.core.tests.dump_writers.layouts import (
    LAYOUTS,
    Format,
    Recorded,
    Value,
    expert_parallel,
    make_model,
    spread_values,
)

FORMATS: tuple[Format, Format] = ("assay", "sglang")
DumpOf = Callable[[str, str, Format], Dump]
LAYOUTS_OF = {
    "micro:llama": LAYOUTS,
    "micro:mixtral": {**LAYOUTS, "ep=2": expert_parallel(2)},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorded]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        name: layouts.record(make_model(name), folder / name.replace(":", "-"), parameters=True)
        for name in LAYOUTS_OF
    }


@pytest.fixture(scope="module")
def dump_of(runs: dict[str, Recorded], tmp_path_factory: pytest.TempPathFactory) -> DumpOf:
    folder = tmp_path_factory.mktemp("dumps")
    opened: dict[tuple[str, str, Format], Dump] = {}

    def get(model: str, layout: str, form: Format) -> Dump:
        key = model, layout, form
        if key not in opened:
            values = spread_values(runs[model], LAYOUTS_OF[model][layout])
            place = folder / str(len(opened))
            opened[key] = write(values, place, form)
        return opened[key]

    return get


def write(values: list[Value], folder: Path, form: Format) -> Dump:
    """Write values in SGLang's format, with dims, and in assay's, without."""
    return open_dump(layouts.write(values, folder, form, declared=form == "sglang"))


def judge(expected: Dump, actual: Dump) -> Verdict:
    return compare_dumps(CompareOptions("", ""), expected, actual, SilentProgress()).verdict


def in_turn(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return every pair of names. Every second pair is swapped."""
    pairs = enumerate(combinations(names, 2))
    return [(other, one) if number % 2 else (one, other) for number, (one, other) in pairs]


def long_without(names: Iterable[str], pairs: Iterable[tuple[str, ...]]) -> list[Any]:
    """Mark as long the pairs that have none of the names."""
    repeats = pytest.mark.long
    return [
        pytest.param(*pair, marks=[] if set(names) & set(pair) else [repeats]) for pair in pairs
    ]


PAIRS = [
    (model, *pair)
    for model, of in LAYOUTS_OF.items()
    for pair in in_turn(of)
    if model == "micro:llama" or "ep=2" in pair
]


@pytest.mark.parametrize(("model", "one", "other"), long_without(["tp=1", "tp=4"], PAIRS))
def test_layouts_agree(dump_of: DumpOf, model: str, one: str, other: str) -> None:
    """EXPECTED declares no layout: shapes and values determine it. ACTUAL declares its dims."""
    verdict = judge(dump_of(model, one, "assay"), dump_of(model, other, "sglang"))
    assert verdict.verdict is Outcome.PASS, (verdict.headline, verdict.levels, verdict.unmatched)


def scale(path: str, columns: slice, rows: slice, factor: float) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.get_parameter(path).data[..., rows, columns] *= factor

    return change


def wrong_expert(model: Any) -> None:
    model.model.layers[1].mlp.experts.down_proj.data[3] *= 1.05


ALL = slice(None)
# Of layer 1: the second half of up_proj's rows, or of down_proj's columns, is on the second of two ranks.
FAULTS: dict[str, tuple[str, str, Callable[[Any], None], str]] = {
    "scaled shard": (
        "micro:llama", "tp=2", scale("model.layers.1.mlp.up_proj.weight", ALL, slice(128, 256), 1.05),
        "model.layers.1.mlp.up_proj",
    ),
    "scaled summand": (
        "micro:llama", "tp=2 partial",
        scale("model.layers.1.mlp.down_proj.weight", slice(128, 256), ALL, 1.05),
        "model.layers.1.mlp.down_proj",
    ),
    "lost summand": (
        "micro:llama", "tp=2 partial",
        scale("model.layers.1.self_attn.o_proj.weight", slice(48, 96), ALL, 0.0),
        "model.layers.1.self_attn.o_proj",
    ),
    "wrong stage": (
        "micro:llama", "pp=2 local", scale("model.layers.1.mlp.up_proj.weight", ALL, ALL, 1.05),
        "model.layers.1.mlp.up_proj",
    ),
    "wrong expert": ("micro:mixtral", "ep=2", wrong_expert, "model.layers.1.mlp.experts"),
}  # fmt: skip


@pytest.mark.parametrize("form", ["assay", pytest.param("sglang", marks=pytest.mark.long)])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_one_ranks_weights_is_located_with_its_rank(
    runs: dict[str, Recorded], dump_of: DumpOf, tmp_path: Path, fault: str, form: Format
) -> None:
    name, layout, change, module = FAULTS[fault]
    model = make_model(name)
    change(model)
    spread = LAYOUTS_OF[name][layout]
    run = layouts.record(model, tmp_path / "run")
    # The weights are right: only the results show the fault.
    run.values.extend(one for one in runs[name].values if one.port.startswith("parameter."))
    actual = write(spread_values(run, spread), tmp_path / "dump", form)
    for expected in ("tp=1", "tp=4", layout):
        verdict = judge(dump_of(name, expected, "sglang"), actual)
        assert verdict.verdict is Outcome.FAIL
        assert verdict.location is not None
        assert (verdict.location.module, verdict.location.rank) == (module, 1), expected


def spoil(
    values: list[Value], module: str, port: str, change: Callable[[Value], Any]
) -> list[Value]:
    """Change the last value of rank 1 at a port."""
    at = next(
        number
        for number in reversed(range(len(values)))
        if (values[number].at.module, values[number].port) == (module, port)
        and values[number].at.rank == 1
    )
    return [replace(one, value=change(one)) if n == at else one for n, one in enumerate(values)]


@pytest.mark.parametrize("form", ["assay", "sglang"])
@pytest.mark.parametrize("layout", ["tp=2", "tp=2 partial", "dp=2"])
def test_a_stale_value_of_one_rank_is_located_with_its_rank(
    runs: dict[str, Recorded], dump_of: DumpOf, tmp_path: Path, layout: str, form: Format
) -> None:
    run, module = runs["micro:llama"], "model.layers.1.mlp"
    values = spread_values(run, LAYOUTS[layout])
    stale = spoil(values, module, "output", lambda one: one.value.flip(-1))
    verdict = judge(dump_of("micro:llama", "tp=1", "assay"), write(stale, tmp_path / "dump", form))
    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert (verdict.location.module, verdict.location.rank) == (module, 1)


@pytest.mark.parametrize("form", ["assay", "sglang"])
@pytest.mark.parametrize(
    ("module", "port"), [("model.layers.1.mlp", "output"), ("model.norm", "parameter.weight")]
)
def test_a_stale_replica_of_expected_forbids_a_pass(
    runs: dict[str, Recorded], dump_of: DumpOf, tmp_path: Path, form: Format, module: str, port: str
) -> None:
    values = spread_values(runs["micro:llama"], LAYOUTS["tp=2"])
    stale = spoil(values, module, port, lambda one: one.value * 1.01)
    verdict = judge(write(stale, tmp_path / "dump", form), dump_of("micro:llama", "tp=1", "assay"))
    assert verdict.verdict is Outcome.NOT_COMPARED
    reason = verdict.levels["completeness"].reason or ""
    assert f"{module}:{port} on rank 1" in reason


@pytest.mark.parametrize("layout", ["tp=2", "dp=2"])
def test_a_wrong_weight_of_one_rank_is_named_with_its_rank(
    runs: dict[str, Recorded], dump_of: DumpOf, tmp_path: Path, layout: str
) -> None:
    values = spread_values(runs["micro:llama"], LAYOUTS[layout])
    module = "model.layers.1.mlp.up_proj"
    wrong = spoil(values, module, "parameter.weight", lambda one: one.value * 1.01)
    verdict = judge(
        dump_of("micro:llama", "tp=1", "assay"), write(wrong, tmp_path / "dump", "sglang")
    )
    assert verdict.diagnosis == "weight-mismatch"
    assert verdict.location is not None
    assert (verdict.location.parameter, verdict.location.rank) == (f"{module}.weight", 1)


def test_a_layout_that_contradicts_the_shapes_does_not_pass(
    runs: dict[str, Recorded], dump_of: DumpOf, tmp_path: Path
) -> None:
    """Declare the replicas of a norm as shards, which makes the norm twice as wide as expected."""
    values = [
        replace(one, split={-1: "tp"}) if (one.name, one.port) == ("norm", "output") else one
        for one in spread_values(runs["micro:llama"], LAYOUTS["tp=2"])
    ]
    verdict = judge(
        dump_of("micro:llama", "tp=1", "assay"), write(values, tmp_path / "dump", "sglang")
    )
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert "its layout 'b s h[tp]' assembles 2 parts" in (
        verdict.levels["completeness"].reason or ""
    )


EXPERTS = {
    "one rank": layouts.single,
    "ep=2": layouts.experts_over_ranks(2, local=False),
    "ep=2 local": layouts.experts_over_ranks(2, local=True),
    "ep=4 local": layouts.experts_over_ranks(4, local=True),
}


@pytest.mark.parametrize(("one", "other"), long_without(["one rank"], in_turn(EXPERTS)))
def test_experts_are_matched_however_ranks_number_them(
    runs: dict[str, Recorded], tmp_path: Path, one: str, other: str
) -> None:
    run = layouts.split_experts(runs["micro:mixtral"])
    dumps = [
        write(spread_values(run, EXPERTS[name]), tmp_path / name, form)
        for name, form in zip((one, other), FORMATS, strict=True)
    ]
    verdict = judge(*dumps)
    assert verdict.verdict is Outcome.PASS, (verdict.headline, verdict.levels)
    module = "model.layers.1.mlp.experts.1" if "local" in other else "model.layers.1.mlp.experts.3"
    values = spread_values(run, EXPERTS[other])
    if other in ("ep=2", "ep=2 local"):
        wrong = spoil(values, module, "output", lambda value: value.value * 1.05)
        verdict = judge(dumps[0], write(wrong, tmp_path / "wrong", "sglang"))
        assert verdict.location is not None
        found = verdict.location.module, verdict.location.rank
        assert found == ("model.layers.1.mlp.experts.3", 1)


CONTEXT = {
    "one rank": layouts.single,
    "cp=2": layouts.context_parallel(2, zigzag=False),
    "cp=2 zigzag": layouts.context_parallel(2, zigzag=True),
    "cp=4 zigzag": layouts.context_parallel(4, zigzag=True),
    "tp=2": LAYOUTS["tp=2"],
}


@pytest.mark.parametrize(("one", "other"), long_without(["one rank"], in_turn(CONTEXT)))
def test_parts_of_a_prompt_are_matched_by_position(
    runs: dict[str, Recorded], tmp_path: Path, one: str, other: str
) -> None:
    """Positions come from rows in assay's format, and from position ids or the layout in SGLang's."""
    run = runs["micro:llama"]
    dumps = [
        write(spread_values(run, CONTEXT[name]), tmp_path / name, form)
        for name, form in zip((one, other), FORMATS, strict=True)
    ]
    verdict = judge(*dumps)
    assert verdict.verdict is Outcome.PASS, (verdict.headline, verdict.levels, verdict.unmatched)


@pytest.mark.parametrize("form", ["assay", "sglang"])
def test_a_fault_in_a_part_of_a_prompt_is_located_with_its_rank(
    runs: dict[str, Recorded], dump_of: DumpOf, tmp_path: Path, form: Format
) -> None:
    module = "model.layers.1.mlp.up_proj"
    values = spread_values(runs["micro:llama"], CONTEXT["cp=2 zigzag"])
    wrong = [
        replace(one, value=one.value * 1.05)
        if one.at.rank == 1 and (one.at.module, one.port) == (module, "output")
        else one
        for one in values
    ]
    verdict = judge(dump_of("micro:llama", "tp=1", "assay"), write(wrong, tmp_path / "dump", form))
    assert verdict.location is not None
    assert (verdict.location.module, verdict.location.rank) == (module, 1)


def test_a_layout_provides_positions_without_a_position_tensor(
    runs: dict[str, Recorded], dump_of: DumpOf, tmp_path: Path
) -> None:
    values = [
        one
        for one in spread_values(runs["micro:llama"], CONTEXT["cp=2 zigzag"])
        if not one.port.endswith("position_ids") and one.at.step == 0
    ]
    actual = write(values, tmp_path / "dump", "sglang")
    verdict = judge(dump_of("micro:llama", "tp=1", "assay"), actual)
    # Positions of the prefill are known. Tensors that only EXPECTED dumped have no partner.
    failed = [name for name, level in verdict.levels.items() if level.verdict is Outcome.FAIL]
    assert not failed
    assert (verdict.levels["modules"].compared or 0) > 100


def fuse(values: list[Value]) -> list[Value]:
    """Return values of a model that computes queries, keys and values in one projection per rank."""
    by_place = {(one.at, one.port): one.value for one in values}
    fused = []
    for one in values:
        if one.name in {"k_proj", "v_proj"}:
            continue
        if one.name == "q_proj":
            path = one.at.module.removesuffix("q_proj")
            dim = -2 if one.port.startswith("parameter.") else -1
            names = ("q_proj", "k_proj", "v_proj")
            places = [(replace(one.at, module=path + name), one.port) for name in names]
            value = one.value
            if not one.port.startswith("input."):
                value = torch.cat([by_place[place] for place in places], dim)
            at = replace(one.at, module=f"{path}qkv_proj")
            fused.append(replace(one, at=at, value=value, split={-9: "tp"}))
        else:
            fused.append(one)
    return fused


@pytest.mark.parametrize(("one", "other"), [("tp=1", "tp=2"), ("tp=2", "tp=1")])
def test_fused_projections_of_ranks_are_put_together(
    runs: dict[str, Recorded], tmp_path: Path, one: str, other: str
) -> None:
    run = runs["micro:llama"]
    sides = [fuse(spread_values(run, LAYOUTS[name])) for name in (one, other)]
    dumps = [
        write(values, tmp_path / name, form)
        for values, name, form in zip(sides, (one, other), FORMATS, strict=True)
    ]
    verdict = judge(*dumps)
    assert verdict.verdict is Outcome.PASS, (verdict.headline, verdict.levels)
    if other == "tp=2":
        module = "model.layers.1.self_attn.qkv_proj"
        wrong = spoil(sides[1], module, "output", lambda value: value.value * 1.05)
        verdict = judge(dumps[0], write(wrong, tmp_path / "wrong", "sglang"))
        assert verdict.location is not None
        assert (verdict.location.module, verdict.location.rank) == (module, 1)


WHOLE = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def find(
    expected: list[Tensor],
    actual: list[Tensor],
    list_candidates: Callable[[Sequence[Shape]], list[PlacementRule]] = list_rules,
) -> tuple[PlacementRule | None, PlacementRule | None] | None:
    finder = PlacementFinder((False, False), list_candidates)
    finder.add_pass((expected, actual), (None, None), lambda *both: give_comparable(None, *both))
    found = finder.find()
    return found.rules if found is not None else None


def rule(actual: list[Tensor]) -> PlacementRule | None:
    found = find([WHOLE], actual)
    assert found is not None
    return found[1]


def place(one: PlacementRule, parts: list[Tensor]) -> Placement:
    placement = one.place([tuple(part.shape) for part in parts])
    assert placement is not None
    return placement


def test_equal_parts_are_replicas() -> None:
    assert rule([WHOLE, WHOLE]) == PlacementRule("replicated")
    placement = place(PlacementRule("replicated"), [WHOLE, WHOLE])
    assert placement.replicas == [(1, 0)]
    assert placement.parts == [(0,), (1,)]
    assert placement.slices[1].cut(WHOLE) is WHOLE


@pytest.mark.parametrize("dim", [-1, -2])
def test_parts_along_a_dim_make_up_the_whole(dim: int) -> None:
    parts = list(WHOLE.split((1, 3) if dim == -2 else (2, 4), dim))
    assert rule(parts) == PlacementRule("sharded", dim)
    placement = place(PlacementRule("sharded", dim), parts)
    assert torch.equal(placement.assemble(parts), WHOLE)
    assert torch.equal(placement.slices[1].cut(WHOLE), parts[1])


def test_consecutive_ranks_may_hold_the_same_shard() -> None:
    one, other = WHOLE.chunk(2, 1)
    parts = [one, one, other, other]
    assert rule(parts) == PlacementRule("sharded", -1, 2)
    assert torch.equal(place(PlacementRule("sharded", -1, 2), parts).assemble(parts), WHOLE)


def test_parts_that_add_up_to_the_whole_are_summands() -> None:
    parts = [WHOLE * 0.25, WHOLE * 0.75]
    assert rule(parts) == PlacementRule("partial")
    placement = place(PlacementRule("partial"), parts)
    assert placement.parts == [(0, 1)]
    assert torch.equal(placement.assemble(parts), WHOLE)


def test_two_shards_and_three_of_one_tensor() -> None:
    two, three = list(WHOLE.chunk(2, 1)), list(WHOLE.chunk(3, 1))
    assert find(two, three) == (PlacementRule("sharded", -1), PlacementRule("sharded", -1))


def test_shards_against_summands() -> None:
    shards, summands = list(WHOLE.chunk(2, 1)), [WHOLE - 7, WHOLE * 0 + 7]
    assert find(shards, summands) == (PlacementRule("sharded", -1), PlacementRule("partial"))
    assert find(summands, shards) == (PlacementRule("partial"), PlacementRule("sharded", -1))


def test_one_wrong_rank_does_not_change_the_placement() -> None:
    assert rule([WHOLE, WHOLE.flip(0)]) == PlacementRule("replicated")
    first, second = WHOLE.chunk(2, 1)
    assert rule([first, second * 1.5]) == PlacementRule("sharded", -1)
    assert find([WHOLE, WHOLE.flip(0)], [WHOLE]) == (
        PlacementRule("replicated"),
        PlacementRule("replicated"),
    )


def test_a_lost_replica_is_not_a_summand() -> None:
    """A tensor of zeros would complete a sum, so a sum needs more evidence than its values."""
    assert rule([WHOLE, WHOLE * 0]) == PlacementRule("replicated")


def test_parts_that_fit_no_placement_have_none() -> None:
    assert find([WHOLE], [WHOLE[:, :2], WHOLE[:, 2:5]]) is None
    assert list_rules([(4, 2), (3, 3)]) == []


def test_every_replica_of_expected_is_an_error_of_its_own() -> None:
    placement = place(PlacementRule("replicated"), [WHOLE, WHOLE])
    single = place(PlacementRule("replicated"), [WHOLE])
    sides = [WHOLE, WHOLE * 1.5], [WHOLE]
    found = list_errors(sides, placement, single, lambda *both: both)
    assert list(found) == [pytest.approx(0.5), 0.0]


@pytest.mark.parametrize("factor", [0.0, 1.05])
def test_the_wrong_summand_is_the_one_that_explains_the_error(factor: float) -> None:
    summands = [WHOLE, WHOLE.flip(0).exp(), WHOLE.flip(1)]
    wrong = [summands[0], summands[1] * factor, summands[2]]
    total = sum(wrong, WHOLE * 0)
    assert find_wrong_summand((0, 1, 2), wrong, total, sum(summands, WHOLE * 0)) == 1


@pytest.mark.parametrize("sections", [(1, 1), (1, 1, 1), (4, 1, 1)])
@pytest.mark.parametrize("num", [2, 4])
def test_ranks_hold_a_shard_of_each_fused_projection(sections: tuple[int, ...], num: int) -> None:
    projections = [torch.randn(5, 8 * share) for share in sections]
    whole = torch.cat(projections, -1)
    parts = [
        torch.cat([one.chunk(num, -1)[rank] for one in projections], -1) for rank in range(num)
    ]
    fused = PlacementRule("sharded", -1, 1, sections)
    assert find([whole], parts, list_fused_rules) == (PlacementRule("replicated"), fused)
    assert torch.equal(place(fused, parts).assemble(parts), whole)
    assert torch.equal(place(fused, parts).slices[1].cut(whole), parts[1])
    # A fault on one rank does not change the placement.
    wrong = [parts[0], parts[1] * 1.5, *parts[2:]]
    assert find([whole], wrong, list_fused_rules) == (PlacementRule("replicated"), fused)
