import json
import math
from pathlib import Path

import pytest
import torch

from assay.judge.results import PortResult, ReplayResults, attach_results, read_results
from assay.sites import CallSite
from assay.stages import Stage
from assay.trace import Trace, TraceError, TraceWriter


def port_result(module: str = "mlp", port: str = "output") -> PortResult:
    return PortResult(module, port, Stage(module), 3, "bfloat16", "Linear", pointwise=True)


@pytest.fixture
def results() -> ReplayResults:
    """Two ports: one with rows that hold a NaN, one that is exact."""
    one, two = port_result(), port_result("", "input.input_ids")
    actual = torch.tensor([[1.0, 2.0], [3.0, math.nan]])
    address = torch.tensor([4, 5])
    one.sums.add(actual, torch.ones(2, 2), address, 10 * address)
    two.exact.add(7, 1)
    two.exact.num_near_ties = 2
    two.exact.first = (1, 17)
    found = ReplayResults({("mlp", "output"): one, ("", "input.input_ids"): two}, num_identical=9)
    found.note_extra_port("mlp", "output.1")
    found.note_missing_port("attn", "output")
    found.note_missing_call(CallSite(0, "mlp.act"), is_inside_called=True)
    return found


def through_a_trace(results: ReplayResults, folder: Path) -> ReplayResults:
    with TraceWriter(folder, {}) as writer:
        attach_results(writer, "replay", results)
    return read_results(Trace.open(folder), "replay")


def test_everything_measured_survives_the_way_to_the_judging_process(
    results: ReplayResults, tmp_path: Path
) -> None:
    read = through_a_trace(results, tmp_path / "t")

    one = read.ports["mlp", "output"]
    original = results.ports["mlp", "output"].sums
    assert (one.stage, one.order, one.dtype, one.kind, one.pointwise) == (
        Stage("mlp"), 3, "bfloat16", "Linear", True,
    )  # fmt: skip
    assert (one.sums.num_elements, one.sums.num_calls, one.sums.num_nan) == (4, 1, 1)
    assert (one.sums.dd, one.sums.ee, one.sums.de) == (original.dd, original.ee, original.de)
    assert (one.sums.slope, one.sums.bin_bias()) == (original.slope, original.bin_bias())
    assert one.sums.channel is not None
    assert original.channel is not None
    assert torch.equal(one.sums.channel, original.channel)
    assert one.sums.worst == original.worst
    assert one.sums.worst_row()[1:] == (5, 50)
    assert math.isnan(one.sums.worst_row()[0])


def test_exact_counts_and_lists_survive(results: ReplayResults, tmp_path: Path) -> None:
    read = through_a_trace(results, tmp_path / "t")

    assert read.ports["", "input.input_ids"].exact == results.ports["", "input.input_ids"].exact
    assert read.num_identical == 9
    assert (read.uncalled_modules, read.unmatched_expected, read.unmatched_actual) == (
        ["mlp.act"], ["attn:output"], ["mlp:output.1"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("part", "name"),
    [("sums", "dede"), ("exact", "num_different"), ("worst", "difference"), ("stage", "phase")],
)
def test_missing_number_is_refused_and_not_zero(
    results: ReplayResults, part: str, name: str
) -> None:
    data, tensors = results.to_parts()
    del data["ports"][0][part][name]

    with pytest.raises(TraceError) as error:
        ReplayResults.from_parts(data, tensors, Path("golden"))

    assert str(error.value) == (
        f"golden: mlp:output lacks {part}.{name}, unlike in this version of assay: record it again with"
        " `assay capture`, or use the version that recorded it"
    )


@pytest.mark.parametrize("name", ["bins", "row_slopes", "rows.error"])
def test_missing_tensor_of_sums_is_refused(results: ReplayResults, name: str) -> None:
    data, tensors = results.to_parts()
    del tensors[f"0.{name}"]

    with pytest.raises(TraceError, match=f"mlp:output lacks {name}, unlike"):
        ReplayResults.from_parts(data, tensors, Path("golden"))


def test_sum_of_a_later_version_is_refused(results: ReplayResults) -> None:
    data, tensors = results.to_parts()
    data["ports"][1]["sums"]["ddd"] = 1.0

    with pytest.raises(TraceError, match=r"\(model\):input.input_ids holds sums.ddd, unlike"):
        ReplayResults.from_parts(data, tensors, Path("golden"))


def test_order_of_ports_survives(results: ReplayResults, tmp_path: Path) -> None:
    assert list(through_a_trace(results, tmp_path / "t").ports) == list(results.ports)


def test_empty_results_survive(tmp_path: Path) -> None:
    assert through_a_trace(ReplayResults(), tmp_path / "t").ports == {}


def test_parts_are_json_without_numbers_that_json_lacks(results: ReplayResults) -> None:
    results.ports["mlp", "output"].sums.dd = math.inf
    data, _ = results.to_parts()

    # What the store cannot write would be lost, or kill the process that measured it.
    text = json.dumps(data)
    assert json.loads(text)["ports"][0]["module"] == "mlp"


def test_what_is_noted_twice_is_listed_once() -> None:
    results = ReplayResults()
    for step in range(3):
        results.note_missing_call(CallSite(step, "mlp"), is_inside_called=False)
        results.note_extra_call(CallSite(step, ""))

    assert results.unmatched_expected == ["mlp"]
    assert results.unmatched_actual == ["(model)"]


def test_sums_that_hold_infinity_survive(tmp_path: Path) -> None:
    results = ReplayResults({("mlp", "output"): port_result()})
    results.ports["mlp", "output"].sums.dd = math.inf
    results.ports["mlp", "output"].sums.ee = 1.0

    read = through_a_trace(results, tmp_path / "t")

    assert read.ports["mlp", "output"].sums.relative_error == math.inf


def test_larger_row_slopes_replace_those_of_a_run_that_happened_to_be_exact() -> None:
    exact, rounded, unknown = ReplayResults(), ReplayResults(), ReplayResults()
    expected = torch.rand(8, 16, dtype=torch.float64) + 1
    address = torch.arange(8)
    for results, factor in ((exact, 1.0), (rounded, 1.01)):
        at_port = results.at("attn", "output", Stage("attn"), "bfloat16", "Attention")
        at_port.sums.add(factor * expected, expected, address, address)
    exact.keep_larger_row_slopes(rounded)
    exact.keep_larger_row_slopes(unknown)
    sums = exact.ports["attn", "output"].sums
    assert sums.row_slope()[0] == pytest.approx(0.01)
    assert sums.relative_error == 0
    rounded.keep_larger_row_slopes(exact)
    assert rounded.ports["attn", "output"].sums.row_slope()[0] == pytest.approx(0.01)
