"""From sums to ratios, and from ratios to the stage that is wrong."""

import math

import pytest
import torch
from torch import Tensor

from assay.judge.limits import Limits
from assay.judge.replays import (
    FailedStage,
    Judged,
    find_origin,
    judge_replay,
    list_suspects,
    rank_stages,
)
from assay.judge.results import PortResult, ReplayResults
from assay.stages import Stage
from assay.statistics import GENERAL, OF_STAGES, STATISTICS, SYSTEMATIC, Statistic
from assay.verdicts import Location, Ratio

LIMITS = Limits(
    "test",
    "by hand",
    dict.fromkeys(STATISTICS, 4.0) | {"replay-tensor": 3.0, "replay-slope": 6.0},
)
# What an error of all elements, without any pattern, fails by.
LARGE = OF_STAGES.intersection(GENERAL)
UNIT = 2.0**-8
ROWS, COLUMNS = 256, 16


def port(module: str, order: int = 0, kind: str = "Linear", name: str = "output") -> PortResult:
    return PortResult(module, name, Stage(module), order, "bfloat16", kind)


def measured(module: str, error: Tensor, order: int = 0, kind: str = "Linear") -> PortResult:
    result = port(module, order, kind)
    expected = torch.ones(ROWS, COLUMNS, dtype=torch.float64)
    address = torch.arange(ROWS)
    result.sums.add(expected + error, expected, torch.zeros_like(address), address)
    return result


def noise(size: float = UNIT / 2) -> Tensor:
    """Errors of one size without a mean, in every channel and bin."""
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(ROWS // 2)
    return size * signs[:, None].expand(ROWS, COLUMNS)


def results(*ports: PortResult) -> ReplayResults:
    return ReplayResults({(item.module, item.port): item for item in ports})


def failed_statistics(judged: list[Judged]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for item in judged:
        if item.failed:
            found.setdefault(item.port.module, set()).add(item.statistic)
    return found


def judged(statistic: Statistic, value: float, module: str = "m", order: int = 0) -> Judged:
    return Judged.of(Ratio(statistic, value, 1.0), LIMITS.of(statistic), port(module, order))


def test_suspects_with_equal_ratios_are_in_model_order() -> None:
    ranked = rank_stages([judged("replay-tensor", 6.0, name, n) for n, name in enumerate("abc")])
    named = Location(phase="forward", module="c"), ranked[2].reported
    listed = list_suspects(
        ranked[::-1], lambda one: Location(phase="forward", module=one.stage.module), named
    )
    assert [one.location.module for one in listed] == ["a", "b", "c"]


def test_severity_is_how_many_times_over_the_limit() -> None:
    assert judged("replay-tensor", 6.0).severity == 2.0
    assert judged("replay-tensor", 3.0).severity == 1.0


def test_ratio_at_the_limit_is_within_and_over_it_is_not() -> None:
    assert not judged("replay-tensor", 3.0).failed
    assert judged("replay-tensor", 3.0000001).failed


@pytest.mark.parametrize("statistic", ["exact", "non-finite"])
def test_any_difference_in_what_must_be_exact_is_infinitely_severe(statistic: Statistic) -> None:
    assert judged(statistic, 1e-9).severity == math.inf
    assert judged(statistic, 0.0).severity == 0.0


def test_resolution_is_the_smallest_error_that_would_have_failed() -> None:
    item = Judged.of(Ratio("replay-tensor", 0.001, 0.002), 3.0, port("m"))

    assert item.resolution == pytest.approx(0.006)
    assert not Judged.of(Ratio("replay-tensor", 0.00599, 0.002), 3.0, port("m")).failed
    assert Judged.of(Ratio("replay-tensor", 0.00601, 0.002), 3.0, port("m")).failed


def test_run_like_the_noise_run_passes_every_statistic() -> None:
    clean = results(measured("m", noise()))

    items, bias = judge_replay(clean, results(measured("m", -noise())), LIMITS)

    assert failed_statistics(items) == {}
    assert bias is None
    # Only stages that add nothing up have a share.
    assert {item.statistic for item in items} == OF_STAGES - {"replay-share"}


def test_fused_module_may_round_as_often_as_the_children_whose_work_it_does() -> None:
    reference = results(
        measured("mlp", noise()), measured("mlp.gate", noise(3 * UNIT)), measured("other", noise())
    )
    candidate = results(measured("mlp", noise(3 * UNIT)), measured("other", noise(3 * UNIT)))
    candidate.uncalled_modules = ["mlp.gate"]

    items, _ = judge_replay(candidate, reference, LIMITS)

    assert failed_statistics(items) == {"other": LARGE}


def test_module_known_only_by_what_it_made_for_its_children_has_the_allowance() -> None:
    made_for_child = measured("model.mlp.down", noise())
    made_for_child.stage = Stage("model.mlp")
    reference = results(measured("model.mlp.up", noise(3 * UNIT)), made_for_child)
    wider = measured("model.mlp.down", noise(3 * UNIT))
    wider.stage = Stage("model.mlp")
    candidate = results(wider)
    candidate.uncalled_modules = ["model.mlp.up"]

    items, _ = judge_replay(candidate, reference, LIMITS)

    assert failed_statistics(items) == {}


def test_container_that_is_never_called_passes_the_allowance_on_to_its_ancestor() -> None:
    reference = results(measured("model", noise()), measured("model.layers.1", noise(3 * UNIT)))
    candidate = results(measured("model", noise(3 * UNIT)))
    candidate.uncalled_modules = ["model.layers.1"]  # in a ModuleList, model.layers

    items, _ = judge_replay(candidate, reference, LIMITS)

    assert failed_statistics(items) == {}


def backward(module: str, name: str, made_by: str, error: Tensor) -> PortResult:
    """A gradient at a boundary of `module`."""
    result = measured(module, error)
    result.port, result.stage = name, Stage(made_by, "backward")
    return result


@pytest.mark.parametrize(
    ("name", "made_by", "wrong"),
    [
        ("input.x", "mlp.gate", {}),
        ("output", "mlp", {}),
        ("output", "other", {"mlp": LARGE}),
    ],
)
def test_gradients_of_a_fused_module_may_round_as_often_as_those_that_its_children_make(
    name: str, made_by: str, wrong: dict[str, set[str]]
) -> None:
    reference = results(
        backward("mlp", "input.x", "mlp", noise()),
        backward("mlp.gate", name, made_by, noise(3 * UNIT)),
    )
    candidate = results(backward("mlp", "input.x", "mlp", noise(3 * UNIT)))
    candidate.uncalled_modules = ["mlp.gate"]

    items, _ = judge_replay(candidate, reference, LIMITS)

    assert failed_statistics(items) == wrong


def test_larger_error_fails_where_it_is() -> None:
    candidate = results(measured("a", noise()), measured("b", noise(4 * UNIT)))
    reference = results(measured("a", noise()), measured("b", noise()))

    items, _ = judge_replay(candidate, reference, LIMITS)

    assert failed_statistics(items) == {"b": LARGE}


def test_fault_in_one_row_fails_by_the_row() -> None:
    error = noise().clone()
    error[7] *= 10

    items, _ = judge_replay(results(measured("m", error)), results(measured("m", noise())), LIMITS)

    assert failed_statistics(items) == {"m": {"replay-row"}}


def test_scale_within_the_noise_fails_by_systematic_statistics_alone() -> None:
    items, _ = judge_replay(
        results(measured("m", noise() + UNIT / 4)), results(measured("m", noise())), LIMITS
    )

    assert failed_statistics(items)["m"] <= SYSTEMATIC
    assert "replay-slope" in failed_statistics(items)["m"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_value_that_is_not_finite_fails(value: float) -> None:
    error = noise().clone()
    error[3, 3] = value

    items, _ = judge_replay(results(measured("m", error)), results(measured("m", noise())), LIMITS)

    assert failed_statistics(items) == {"m": {"non-finite"}}


def test_one_different_index_fails() -> None:
    item = port("router", name="output.1")
    item.exact.add(1000, 1)

    items, _ = judge_replay(results(item), results(port("router", name="output.1")), LIMITS)

    assert failed_statistics(items) == {"router": {"exact"}}


@pytest.mark.parametrize(
    ("num_different", "fails"), [(0, False), (2, False), (12, False), (13, True)]
)
def test_choices_that_rounding_changes_too_may_differ_as_often(
    num_different: int, *, fails: bool
) -> None:
    """An indexer of sparse attention chooses keys by scores that are nearly equal."""
    of_noise, item = port("indexer"), port("indexer")
    of_noise.exact.add(1000, 2)
    item.exact.add(1000, num_different)

    items, _ = judge_replay(results(item), results(of_noise), LIMITS)

    assert failed_statistics(items) == ({"indexer": {"replay-choice"}} if fails else {})


def test_port_without_a_noise_run_is_judged_by_the_unit_roundoff() -> None:
    items, _ = judge_replay(results(measured("m", noise(2 * UNIT))), results(), LIMITS)

    # 2 u against half a unit: a ratio of 4.
    assert items[0].value == pytest.approx(4.0)
    assert items[0].failed


def test_noise_in_float32_is_not_widened_to_the_candidate_s_dtype() -> None:
    reference = measured("m", noise(1e-8))
    reference.dtype = "float32"

    items, _ = judge_replay(results(measured("m", noise())), results(reference), LIMITS)

    assert items[0].expected == 2.0**-24 / 2
    assert items[0].failed


def rounded(module: str, share: float) -> PortResult:
    """Elements of which `share` are the neighbour of the rounded value."""
    result = ReplayResults().at(module, "output", Stage(module), "bfloat16", "GELU", pointwise=True)
    expected = torch.ones(1000, 4)
    actual = expected.bfloat16().clone()
    wrong = int(share * 1000)
    actual[:wrong:2] = 1.0078125
    actual[1:wrong:2] = 0.9921875  # as often too small
    address = torch.arange(1000)
    result.sums.add(actual, expected, address, address)
    return result


def test_wrongly_rounded_elements_fail_where_the_stage_only_rounds() -> None:
    items, _ = judge_replay(results(rounded("act", 0.1)), results(rounded("act", 0.0)), LIMITS)

    assert "replay-share" in failed_statistics(items)["act"]


@pytest.mark.parametrize("why", ["it adds up", "the noise run rounds wrongly, too"])
def test_wrongly_rounded_elements_say_nothing_where(why: str) -> None:
    reference = rounded("act", 0.1 if why.startswith("the") else 0.0)
    reference.pointwise = not why.startswith("it")

    items, _ = judge_replay(results(rounded("act", 0.1)), results(reference), LIMITS)

    assert "replay-share" not in {item.statistic for item in items}


# A bias that all matrix products share


def biased(shifts: list[float], kind: str = "Linear") -> ReplayResults:
    ports = [
        measured(f"{kind}.{order}", noise() + shift, order, kind)
        for order, shift in enumerate(shifts)
    ]
    return results(*ports)


def test_products_that_all_shrink_alike_are_the_device_s_arithmetic() -> None:
    items, bias = judge_replay(biased([-UNIT / 4] * 6), biased([0.0] * 6), LIMITS)

    assert bias is not None
    assert bias.slope == pytest.approx(-UNIT / 4)
    assert bias.num_modules == 6
    assert "replay-slope" not in {s for names in failed_statistics(items).values() for s in names}


def test_one_product_that_shrinks_is_no_arithmetic_of_the_device() -> None:
    items, bias = judge_replay(biased([0, 0, 0, 0, 0, -UNIT / 4]), biased([0.0] * 6), LIMITS)

    assert bias is None
    assert set(failed_statistics(items)) == {"Linear.5"}


def test_one_product_that_shrinks_differently_from_all_others_fails() -> None:
    shifts = [-UNIT / 4] * 11 + [UNIT / 4]
    items, bias = judge_replay(biased(shifts), biased([0.0] * 12), LIMITS)

    assert bias is not None
    assert "replay-slope" in failed_statistics(items)["Linear.11"]


@pytest.mark.parametrize("shift", [UNIT / 4, -1.5 * UNIT], ids=["grow", "shrink too much"])
def test_what_truncation_cannot_do_is_no_arithmetic_of_the_device(shift: float) -> None:
    items, bias = judge_replay(biased([shift] * 6), biased([0.0] * 6), LIMITS)

    assert bias is None
    assert len(failed_statistics(items)) == 6


def test_few_products_prove_nothing() -> None:
    assert judge_replay(biased([-UNIT / 4] * 3), biased([0.0] * 3), LIMITS)[1] is None


def test_exact_stages_beside_biased_products_do_not_fail() -> None:
    # What truncated products share is no debt of a norm, which has no such error.
    norm = measured("norm", noise(), 9, "LlamaRMSNorm")
    candidate, reference = biased([-UNIT / 4] * 6), biased([0.0] * 6)
    candidate.ports["norm", "output"] = norm
    reference.ports["norm", "output"] = measured("norm", -noise(), 9, "LlamaRMSNorm")

    items, bias = judge_replay(candidate, reference, LIMITS)

    assert bias is not None
    assert "norm" not in failed_statistics(items)


# The place


def test_stages_are_ranked_by_their_worst_statistic() -> None:
    ranked = rank_stages(
        [
            judged("replay-tensor", 6.0, "mild", 0),
            judged("replay-slope", 60.0, "bad", 1),
            judged("replay-tensor", 3.3, "bad", 1),
            judged("replay-tensor", 2.0, "fine", 2),
        ]
    )

    assert [item.stage.module for item in ranked] == ["bad", "mild"]
    assert [item.severity for item in ranked] == [10.0, 2.0]


def test_stage_is_recognised_by_the_statistic_that_is_easiest_to_read() -> None:
    (ranked,) = rank_stages([judged("replay-slope", 60.0), judged("replay-row", 5.0)])

    assert ranked.reported.statistic == "replay-row"
    assert ranked.severity == 10.0


def test_no_failure_has_no_origin() -> None:
    assert rank_stages([judged("replay-tensor", 1.0)]) == []
    assert find_origin([]) is None


def origin_of(*items: Judged) -> str:
    origin = find_origin(rank_stages(items))
    assert isinstance(origin, FailedStage)
    return origin.stage.module


def test_origin_is_the_first_of_those_about_as_bad_as_the_worst() -> None:
    first = judged("replay-tensor", 30.0, "first", 1)

    assert origin_of(first, judged("replay-tensor", 90.0, "later", 2)) == "first"


def test_origin_is_not_what_is_mildly_wrong_before_the_worst() -> None:
    # A clean attention at 3.9 hid the true place at 1e6 in the prototype.
    assert (
        origin_of(
            judged("replay-tensor", 3.9, "attention", 1), judged("replay-tensor", 3e6, "model", 2)
        )
        == "model"
    )


def test_origin_is_what_must_be_exact_before_all_that_only_rounds() -> None:
    assert (
        origin_of(judged("replay-tensor", 300.0, "early", 1), judged("exact", 1.0, "positions", 2))
        == "positions"
    )


def test_origin_is_in_forward_where_backward_of_the_same_module_is_worse() -> None:
    forward = judged("replay-tensor", 30.0, "layers.2", 1)
    backward = judged("replay-row", 900.0, "layers.2", 2)
    backward.port.stage = Stage("layers.2", "backward")

    ranked = rank_stages([forward, backward])

    assert find_origin(ranked) == ranked[1]
    # Backward was wrong in a step before.
    assert find_origin(ranked, ranked.index) == ranked[0]


def test_origin_is_the_first_layer_where_all_have_the_same_fault() -> None:
    layers = [
        judged("replay-tensor", ratio, f"layers.{number}.mlp", number)
        for number, ratio in enumerate([2.0, 6.0, 300.0, 40.0])
    ]

    assert origin_of(*layers, judged("replay-tensor", 4.0, "layers.0.attention")) == "layers.1.mlp"
