"""The whole comparison of two dumps of a small network in msprobe's layout."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import assay
from assay.comparison.contents import describe_contents
from assay.comparison.measuring.pair_measurer import divide_pairs
from assay.comparison.pairing.port_series import SeriesPair, collect_series
from assay.errors import UsageError
from assay.verdicts import Outcome
from packages.core.tests.dump_writers.msprobe import dumped
from packages.core.tests.unit.comparison.memory_dump import make_dump
from packages.core.tests.unit.comparison.small_dumps import (
    Network,
    double_scale,
    halve,
    judge,
    write,
)


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    return write(tmp_path / "golden")


def change_weight(network: Any) -> None:
    with torch.no_grad():
        network.layers[2].down.weight[3, 5] += 0.5


def test_equal_dumps_pass(golden: Path, tmp_path: Path) -> None:
    verdict = judge(golden, write(tmp_path / "mine"), tmp_path / "out")
    assert verdict.verdict is Outcome.PASS
    assert verdict.headline == "The dumps agree in all 66 tensors; every value is equal."
    assert verdict.compared == 66


def test_a_coarser_expected_may_be_swapped(tmp_path: Path) -> None:
    fine, coarse = write(tmp_path / "fine"), write(tmp_path / "coarse", lambda one: one.bfloat16())
    question = "EXPECTED is usually the finer one: are the two swapped?"
    notes = judge(coarse, fine, tmp_path / "swapped").notes
    assert f"EXPECTED holds bfloat16, ACTUAL float32; {question}" in notes
    assert not any(question in one for one in judge(fine, coarse, tmp_path / "right").notes)


def test_a_dump_as_model_is_refused(golden: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--model .*golden is a dump \(msprobe\)"):
        judge(golden, golden, tmp_path / "out", model=str(golden))


def test_inspect_lists_damaged_files(golden: Path) -> None:
    assert describe_contents(str(golden)).damaged == []
    file = next(golden.rglob("*layers.1.up*output.0.pt"))
    file.write_bytes(file.read_bytes()[:100])
    contents = describe_contents(str(golden))
    assert len(contents.damaged) == 1
    assert file.name in contents.damaged[0]
    assert f"  damaged: {contents.damaged[0]}" in contents.to_lines()


def test_an_error_of_a_block_s_own_code_is_located_in_the_block(
    golden: Path, tmp_path: Path
) -> None:
    verdict = judge(golden, write(tmp_path / "mine", double_scale), tmp_path / "out")
    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert verdict.location.module == "layers.1"
    assert verdict.diagnosis == "module-error"
    assert "its inputs agree" in str(verdict.levels["modules"].reason)


def test_level_layer_compares_the_blocks_and_not_what_is_in_them(
    golden: Path, tmp_path: Path
) -> None:
    verdict = judge(golden, write(tmp_path / "mine", double_scale), tmp_path / "out", level="layer")
    assert verdict.location is not None
    assert verdict.location.module == "layers.1"
    rows = [
        json.loads(line)
        for line in (tmp_path / "out" / "measurements.jsonl").read_text().splitlines()
    ]
    assert {row["module"] for row in rows} == {"layers.0", "layers.1", "layers.2", "lm_head"}


@pytest.mark.parametrize("level", ["logits", "module"])
def test_logits_have_passed_all_blocks_whatever_is_compared(
    level: str, golden: Path, tmp_path: Path
) -> None:
    verdict = judge(golden, write(tmp_path / "mine", halve), tmp_path / "out", level=level)
    assert verdict.resolution == pytest.approx(3.5 * 4 * 2**-8 * 2)  # three blocks and itself


def test_a_changed_weight_is_named_with_its_row(golden: Path, tmp_path: Path) -> None:
    del golden
    expected = write(tmp_path / "with", parameters=True)
    actual = write(tmp_path / "mine", change_weight, parameters=True)
    verdict = judge(expected, actual, tmp_path / "out")
    assert verdict.diagnosis == "weight-mismatch"
    assert verdict.location is not None
    assert verdict.location.parameter == "layers.2.down.weight"
    assert "1 of 256 values, most at row 3, column 5" in str(verdict.headline)


def test_without_its_weights_the_module_is_located(golden: Path, tmp_path: Path) -> None:
    verdict = judge(golden, write(tmp_path / "mine", change_weight), tmp_path / "out")
    assert verdict.location is not None
    assert verdict.location.module == "layers.2.down"
    assert verdict.first_bad_token is not None


def test_other_prompts_are_reported_before_what_follows(golden: Path, tmp_path: Path) -> None:
    ids = torch.arange(8).reshape(1, 8) + 1
    verdict = judge(golden, write(tmp_path / "mine", ids=ids), tmp_path / "out")
    assert verdict.diagnosis == "inputs-differ"
    assert verdict.headline == "The prompts differ: prompt 0, position 0: token 1, expected 0."


def test_a_file_that_is_missing_forbids_a_pass(golden: Path, tmp_path: Path) -> None:
    mine = write(tmp_path / "mine")
    next(mine.rglob("*lm_head*output.0.pt")).unlink()
    verdict = judge(golden, mine, tmp_path / "out")
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert str(verdict.headline).startswith("Everything with a partner agrees (65 tensors)")
    assert "is missing" in str(verdict.levels["completeness"].reason)


def test_a_run_that_was_cut_off_is_not_compared(golden: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    network, mine = Network(), tmp_path / "mine"
    with torch.no_grad(), dumped(network, mine):
        network(torch.arange(8).reshape(1, 8))
        network(torch.tensor([[9]]))
    verdict = judge(golden, mine, tmp_path / "out")
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert "tokens of step 2 (rows x tokens: 1 x 1)" in verdict.unmatched.expected


def test_what_a_glob_allows_may_be_missing(golden: Path, tmp_path: Path) -> None:
    mine = write(tmp_path / "mine", lambda network: setattr(network, "lm_head", nn.Identity()))
    assert judge(golden, mine, tmp_path / "out").verdict is Outcome.NOT_COMPARED
    assert (
        judge(golden, mine, tmp_path / "allowed", allow_unmatched=("lm_head",)).verdict
        is Outcome.PASS
    )


def test_a_noise_dump_sets_what_is_noise(golden: Path, tmp_path: Path) -> None:
    noise, mine = write(tmp_path / "noise", halve), write(tmp_path / "mine", halve)
    verdict = judge(golden, mine, tmp_path / "out", noise=str(noise))
    assert verdict.verdict is Outcome.PASS
    assert verdict.noise_ratio == pytest.approx(1.0)


def spoil(network: Any) -> None:
    with torch.no_grad():
        network.layers[0].up.bias[2] = torch.nan


def spoil_head(network: Any) -> None:
    """Make one of the logits NaN."""
    with torch.no_grad():
        network.lm_head.weight[31] = torch.nan


def test_a_nan_is_a_failure(golden: Path, tmp_path: Path) -> None:
    verdict = judge(golden, write(tmp_path / "mine", spoil), tmp_path / "out")
    assert verdict.diagnosis == "non-finite"
    assert verdict.location is not None
    assert verdict.location.module == "layers.0.up"


@pytest.mark.parametrize("has_noise", [True, False])
def test_a_nan_in_expected_forbids_a_pass_without_failing(
    golden: Path, tmp_path: Path, has_noise: bool
) -> None:
    broken = write(tmp_path / "broken", spoil_head)
    noise = {"noise": str(write(tmp_path / "noise", spoil_head))} if has_noise else {}
    verdict = judge(broken, golden, tmp_path / "out", **noise)
    assert verdict.verdict is Outcome.NOT_COMPARED
    reason = "EXPECTED holds NaN or infinity at 1 places: lm_head:output"
    assert reason in str(verdict.levels["completeness"].reason)


def as_statistics(folder: Path) -> Path:
    """Turn a dump into one of task `statistics`."""
    for file in folder.rglob("*.pt"):
        file.unlink()
    for file in folder.rglob("dump.json"):
        text = re.sub(r', "data_name": "[^"]*"', "", file.read_text())
        file.write_text(text.replace('"task": "tensor"', '"task": "statistics"'))
    return folder


def test_statistics_locate_and_pass_only_if_they_are_accepted(golden: Path, tmp_path: Path) -> None:
    same = as_statistics(write(tmp_path / "same"))
    verdict = judge(golden, same, tmp_path / "out")
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert "norms of tensors only" in str(verdict.levels["completeness"].reason)
    assert judge(golden, same, tmp_path / "accepted", stats=True).verdict is Outcome.PASS
    wrong = as_statistics(write(tmp_path / "wrong", double_scale))
    verdict = judge(as_statistics(golden), wrong, tmp_path / "wrong-out")
    assert verdict.verdict is Outcome.FAIL
    assert verdict.statistic == "norm-error"
    assert verdict.location is not None
    assert verdict.location.module == "layers.1"


@pytest.mark.parametrize("step", [0, 1])
def test_a_nan_among_statistics_fails_where_it_is_made(
    golden: Path, tmp_path: Path, step: int
) -> None:
    wrong, result = as_statistics(write(tmp_path / "wrong")), "Module.layers.1.down.Linear.forward"
    for file in wrong.rglob("dump.json"):
        index = json.loads(file.read_text())
        index["data"][f"{result}.{step}"]["output"][0]["Norm"] = float("nan")
        file.write_text(json.dumps(index))
    verdict = judge(golden, wrong, tmp_path / "out", stats=True)
    assert verdict.verdict is Outcome.FAIL
    assert verdict.statistic == "non-finite"
    assert verdict.location is not None
    assert verdict.location.module == "layers.1.down"
    verdict = judge(wrong, golden, tmp_path / "swapped", stats=True)
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert "EXPECTED holds NaN or infinity" in str(verdict.levels["completeness"].reason)


def sharpen(network: Network) -> None:
    with torch.no_grad():
        network.lm_head.weight *= 4


def sharpen_and_halve(network: Network) -> None:
    sharpen(network)
    halve(network)


def test_published_limits_decide_if_they_are_named(golden: Path, tmp_path: Path) -> None:
    mine = write(tmp_path / "mine", change_weight)
    verdict = judge(golden, mine, tmp_path / "out", limits="ascend")
    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert verdict.location.module == "layers.2.down"
    assert (verdict.statistic, verdict.limit) == ("cosine-distance", 1.0)
    reason = str(verdict.levels["modules"].reason)
    assert reason.startswith("cosine distance 2.31e-2 (limit 1e-3); its inputs agree")
    assert verdict.notes == [
        "decided by the limits 'ascend' for float32, published for Ascend's msit: cosine distance 1e-3"
    ]


def test_published_limits_pass_a_small_fault_that_noise_ratios_fail(
    golden: Path, tmp_path: Path
) -> None:
    mine = write(tmp_path / "mine", double_scale)
    verdict = judge(golden, mine, tmp_path / "out", limits="ascend")
    assert verdict.verdict is Outcome.PASS
    assert verdict.headline == "The dumps are within the limits 'ascend' in all 66 tensors."
    assert judge(golden, mine, tmp_path / "noise").verdict is Outcome.FAIL


def test_equal_dumps_agree_by_any_limits(golden: Path, tmp_path: Path) -> None:
    verdict = judge(golden, write(tmp_path / "mine"), tmp_path / "out", limits="ascend")
    assert verdict.headline == "The dumps agree in all 66 tensors."


def test_a_divergence_has_a_limit_for_some_dtypes(tmp_path: Path) -> None:
    """Logits four times as large have the same direction but another distribution."""
    half, whole = (write(tmp_path / name, change) for name, change in (("h", halve), ("w", id)))
    sharp = write(tmp_path / "sh", sharpen_and_halve)
    verdict = judge(half, sharp, tmp_path / "bfloat16", limits="ascend")
    assert verdict.verdict is Outcome.FAIL
    assert verdict.statistic == "kl-divergence"
    assert verdict.location is not None
    assert verdict.location.module == "lm_head"
    verdict = judge(whole, write(tmp_path / "sw", sharpen), tmp_path / "float32", limits="ascend")
    assert verdict.verdict is Outcome.PASS


def test_a_nan_is_over_published_limits_too(golden: Path, tmp_path: Path) -> None:
    mine = write(tmp_path / "mine", spoil)
    for options in ({}, {"compat": True}):
        folder = tmp_path / f"out-{len(options)}"
        verdict = judge(golden, mine, folder, limits="ascend", **options)
        assert verdict.diagnosis == "non-finite"
        assert verdict.location is not None
        assert verdict.location.module == "layers.0.up"


@pytest.mark.parametrize("option", [{"model": "micro:llama"}, {"noise": "golden"}, {"stats": True}])
def test_published_limits_refuse_what_needs_noise_ratios(
    golden: Path, tmp_path: Path, option: dict[str, object]
) -> None:
    if "noise" in option:
        option = {"noise": str(golden)}
    message = (
        "--model, --noise and --stats judge by noise ratios, and the limits 'ascend' name none"
    )
    with pytest.raises(UsageError, match=message):
        judge(golden, golden, tmp_path / "out", limits="ascend", **option)


def test_a_table_has_a_row_for_every_tensor_and_the_columns_of_metrics(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = write(tmp_path / "mine", change_weight)
    (tmp_path / "m.py").write_text("def size(golden, my): return my.numel(), '=first'")
    verdict = assay.compare(
        golden, mine, metric=[f"{tmp_path / 'm.py'}:size"], output=tmp_path / "new" / "x.csv"
    )
    assert (verdict.folder / "verdict.json").is_file()
    with (tmp_path / "new" / "x.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == verdict.compared == 66
    assert rows[1]["module"] == "embed"
    assert (rows[1]["size"], rows[1]["size_message"]) == ("128.0", "'=first")
    failed = [row for row in rows if row["verdict"] == "FAIL"]
    assert [(row["module"], row["port"]) for row in failed[:2]] == [
        ("layers.2.down", "output"), ("layers.2", "output"),
    ]  # fmt: skip


def test_without_a_table_file_the_metrics_stand_in_the_folder_of_the_run(
    golden: Path, tmp_path: Path
) -> None:
    verdict = assay.compare(golden, golden, compat=True, output=tmp_path / "run")
    assert verdict.folder == tmp_path / "run"
    assert (tmp_path / "run" / "tensors.csv").read_text().count("\n") == 67


def test_a_metric_that_raises_is_named_with_the_place(golden: Path, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("def size(golden, my): raise KeyError(my.numel())")
    message = r"m\.py:size raised for embed:input\.0 at step 0: KeyError: 8"
    with pytest.raises(UsageError, match=message):
        judge(
            golden, golden, tmp_path / "out", metrics=(f"{tmp_path / 'm.py'}:size",),
            table=tmp_path / "x.csv",
        )  # fmt: skip


def test_processes_measure_the_same_as_one(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("assay.comparison.measuring.pair_measurer._FEWEST_BYTES", 1 << 10)
    mine = write(tmp_path / "mine", double_scale)
    threads = torch.get_num_threads()
    written = []
    for number in (1, 2):
        torch.set_num_threads(number)
        folder = tmp_path / f"{number}"
        judge(golden, mine, folder, table=tmp_path / f"{number}.csv")
        table = (tmp_path / f"{number}.csv").read_text()
        written.append((table, (folder / "measurements.jsonl").read_text()))
    torch.set_num_threads(threads)

    assert "FAIL" in written[0][0]
    assert written[0] == written[1]


def test_pairs_are_divided_into_consecutive_chunks_of_equal_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("assay.comparison.measuring.pair_measurer._FEWEST_BYTES", 64)
    dump = make_dump({(name, "output", 0): torch.ones(4) for name in "abcde"})
    # Both sides of a pair hold 32 bytes.
    pairs = [SeriesPair(series, series) for series in collect_series(dump).values()]
    assert divide_pairs(pairs) == [pairs[:2], pairs[2:4], pairs[4:]]
    assert divide_pairs([*pairs, pairs[0]]) == [[*pairs, pairs[0]]]  # pooled sums
