"""PASS, FAIL at the exact module, and what a PASS could not have seen."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from assay.statistics import OF_STAGES, SYSTEMATIC

Run = Any  # RunAssay of conftest.py
DOWN = "model.layers.1.mlp.down_proj"


def ratio_of(run: Any, statistic: str, module: str = DOWN) -> float:
    (row,) = [
        row
        for row in run.measurements
        if (row["module"], row["port"], row["statistic"]) == (module, "output", statistic)
    ]
    return float(row["ratio"])


def test_healthy_candidate_passes_with_everything_compared(clean: Run) -> None:
    verdict = clean.verdict
    assert (clean.code, verdict["verdict"]) == (0, "PASS")
    assert {name: level["verdict"] for name, level in verdict["levels"].items()} == {
        "load": "PASS", "inputs": "PASS", "tokens": "PASS", "logits": "PASS", "modules": "PASS",
        "sampler": "PASS",
    }  # fmt: skip
    assert all(level["compared"] > 0 for level in verdict["levels"].values())
    assert verdict["compared"] == sum(level["compared"] for level in verdict["levels"].values())
    assert verdict["unmatched"]["expected"] == []
    assert verdict["location"] is None
    assert verdict["first_bad_token"] is None
    assert 0 < verdict["noise_ratio"] < verdict["limit"]


def test_scaled_weights_fail_at_their_module(check: Run, setups: Path) -> None:
    run = check("--candidate-setup", f"{setups}:weights_102")

    verdict = run.verdict
    assert (run.code, verdict["verdict"]) == (1, "FAIL")
    assert verdict["location"]["module"] == DOWN
    assert verdict["location"]["phase"] == "forward"
    assert verdict["location"]["op"] == "linear"
    assert verdict["location"]["parameter"] == f"{DOWN}.weight"
    assert "worst_element" in verdict["levels"]["modules"]
    assert "worst_element" not in verdict["levels"]["inputs"]
    assert verdict["diagnosis"] == "weight-mismatch"
    assert [item["location"]["module"] for item in verdict["suspects"]] == [DOWN]
    assert verdict["noise_ratio"] > verdict["limit"]
    for name in ("statistic", "noise_ratio", "limit"):
        assert verdict["levels"]["modules"][name] == verdict[name]
    assert verdict["first_bad_token"]["phase"] == "prefill"


@pytest.mark.long
def test_scaled_outputs_fail_by_a_systematic_statistic_alone(check: Run, setups: Path) -> None:
    run = check("--candidate-setup", f"{setups}:outputs_1001")

    verdict = run.verdict
    assert (run.code, verdict["location"]["module"]) == (1, DOWN)
    assert verdict["statistic"] in SYSTEMATIC
    assert verdict["diagnosis"] == "module-error"
    # 0.1 % is within the noise of rounding to 8 bits.
    assert ratio_of(run, "replay-tensor") < 1.5
    assert verdict["levels"]["logits"]["verdict"] == "PASS"


def test_fault_in_decode_alone_is_headed_by_the_decode_step(check: Run, setups: Path) -> None:
    run = check("--candidate-setup", f"{setups}:outputs_102_in_decode")

    verdict = run.verdict
    assert (run.code, verdict["location"]["module"]) == (1, DOWN)
    assert verdict["first_bad_token"]["phase"] == "decode"
    step = verdict["location"]["step"]
    assert step > 0
    assert f"{DOWN}, operation" in run.stdout
    assert f"(forward, step {step}) differs from the reference." in run.stdout


@pytest.mark.long
def test_same_outputs_computed_in_another_way_pass(check: Run, setups: Path) -> None:
    run = check("--candidate-setup", f"{setups}:outputs_1")

    assert (run.code, run.verdict["verdict"]) == (0, "PASS")


@pytest.mark.long
def test_fault_below_the_resolution_passes_and_the_resolution_says_so(
    check: Run, setups: Path
) -> None:
    run = check("--candidate-setup", f"{setups}:outputs_100001")

    verdict = run.verdict
    assert (run.code, verdict["verdict"]) == (0, "PASS")
    assert verdict["resolution"] > 1e-5
    resolution = verdict["levels"]["modules"]["resolution"]
    assert all(value > 1e-5 for value in resolution.values())


@pytest.mark.long
def test_small_fault_in_float32_fails_against_the_float64_yardstick(
    check: Run, setups: Path
) -> None:
    run = check("--candidate-setup", f"{setups}:outputs_10002", candidate="cpu/float32")

    assert run.verdict["reference"]["yardstick"] == "float64"
    assert (run.code, run.verdict["location"]["module"]) == (1, DOWN)


def test_healthy_float32_passes_against_the_float64_yardstick(check: Run) -> None:
    run = check(candidate="cpu/float32")

    assert (run.code, run.verdict["verdict"]) == (0, "PASS")
    assert run.verdict["resolution"] < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("setup", ["nan_logits", "inf_logits"])
def test_logits_that_are_not_finite_fail_at_the_head(check: Run, setups: Path, setup: str) -> None:
    run = check("--candidate-setup", f"{setups}:{setup}")

    verdict = run.verdict
    assert (run.code, verdict["location"]["module"]) == (1, "lm_head")
    assert verdict["diagnosis"] == "non-finite"
    assert verdict["noise_ratio"] == "inf"
    assert verdict["levels"]["logits"]["verdict"] == "FAIL"
    assert verdict["levels"]["logits"]["kl_mean"] == "nan"


@pytest.mark.long
def test_logits_made_non_finite_by_padding_fail_where_the_padding_is_written(
    check: Run, setups: Path
) -> None:
    run = check("--candidate-setup", f"{setups}:padding_made_nonfinite")

    verdict = run.verdict
    assert (run.code, verdict["diagnosis"]) == (1, "non-finite")
    assert verdict["location"]["module"] == "model.layers.1"


@pytest.mark.parametrize(
    ("setup", "candidate"),
    [
        ("hidden_units_permuted", "cpu/bfloat16"),
        pytest.param("hidden_units_permuted", "cpu/float32", marks=pytest.mark.long),
        pytest.param("positions_shifted", "cpu/bfloat16", marks=pytest.mark.long),
        pytest.param("positions_shifted", "cpu/float32", marks=pytest.mark.long),
    ],
)
def test_other_representation_of_the_same_model_passes(
    check: Run, setups: Path, setup: str, candidate: str
) -> None:
    run = check("--candidate-setup", f"{setups}:{setup}", candidate=candidate)

    verdict = run.verdict
    assert (run.code, verdict["diagnosis"]) == (0, "representation-difference")
    assert verdict["location"] is None
    assert verdict["suspects"] == []
    assert verdict["noise_ratio"] is None


@pytest.mark.long
@pytest.mark.parametrize("setup", ["keys_102", "keys_102_and_no_differences"])
def test_fault_that_the_text_does_not_show_is_no_representation(
    check: Run, setups: Path, setup: str
) -> None:
    run = check("--candidate-setup", f"{setups}:{setup}")

    verdict = run.verdict
    assert verdict["levels"]["logits"]["verdict"] == "PASS"
    assert run.code == 1
    assert verdict["location"]["module"] == "model.layers.1.self_attn.k_proj"


@pytest.mark.long
def test_rows_that_no_prompt_reaches_fail_all_the_same(check: Run, setups: Path) -> None:
    run = check("--candidate-setup", f"{setups}:rows_zeroed")

    verdict = run.verdict
    assert (run.code, verdict["diagnosis"]) == (1, "weight-mismatch")
    failed = {name for name, level in verdict["levels"].items() if level["verdict"] == "FAIL"}
    assert failed == {"load"}
    assert verdict["location"]["parameter"] == "model.embed_tokens.weight"
    assert "rows 0 to 7 of 260: relative error 1.0" in verdict["levels"]["load"]["reason"]
    assert "it counts even if no input uses it" in run.stdout


@pytest.mark.long
def test_rows_zeroed_beside_permuted_units_are_no_representation(check: Run, setups: Path) -> None:
    run = check("--candidate-setup", f"{setups}:rows_zeroed_and_units_permuted")

    assert (run.code, run.verdict["levels"]["load"]["verdict"]) == (1, "FAIL")


@pytest.mark.long
@pytest.mark.parametrize(
    ("setup", "code", "reason"),
    [
        ("two_tokens_fewer", 1, "ids in each row, not "),
        ("no_output", 1, "generate returned NoneType without sequences and logits"),
        ("raises_in_generate", 3, "the model raised RuntimeError: no such kernel"),
    ],
)
def test_output_of_another_shape_is_judged(
    check: Run, setups: Path, setup: str, code: int, reason: str
) -> None:
    run = check("--candidate-setup", f"{setups}:{setup}")

    levels = run.verdict["levels"]
    assert run.code == code
    assert levels["tokens"]["verdict"] == ("FAIL" if code == 1 else "NOT_COMPARED")
    assert reason in levels["tokens"]["reason"]
    assert levels["modules"]["verdict"] == ("PASS" if code == 1 else "NOT_COMPARED")


def test_zero_comparisons_exit_3(check: Run, setups: Path) -> None:
    run = check("--candidate-setup", f"{setups}:gone")

    assert run.verdict["levels"]["modules"]["compared"] == 0
    assert (run.code, run.verdict["verdict"]) == (3, "NOT_COMPARED")


@pytest.mark.long
@pytest.mark.parametrize("setup", ["nothing", "same"])
def test_setup_may_return_nothing_or_the_model(check: Run, setups: Path, setup: str) -> None:
    assert check("--candidate-setup", f"{setups}:{setup}").code == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "option", ["threads=2", "attention=eager", "attention=sdpa", "batch-size=1", "padding=left"]
)
def test_other_ways_to_run_the_same_model_pass(check: Run, option: str) -> None:
    run = check("--candidate-option", option)

    assert (run.code, run.verdict["verdict"]) == (0, "PASS")
    name, _, value = option.partition("=")
    assert run.verdict["candidate"]["options"] == {name: value}


@pytest.mark.long
@pytest.mark.parametrize("candidate", ["sim/bfloat16", "sim:truncate/bfloat16"])
def test_simulated_devices_pass(check: Run, candidate: str) -> None:
    run = check(candidate=candidate)

    assert (run.code, run.verdict["verdict"]) == (0, "PASS")


def numbers(run: Any) -> tuple[Any, Any]:
    """What a verdict says in numbers, without names of folders, times and commands."""
    verdict = run.verdict
    keys = ("verdict", "levels", "location", "suspects", "noise_ratio", "limit", "statistic",
            "resolution", "compared", "first_bad_token", "diagnosis")  # fmt: skip
    return {key: verdict[key] for key in keys}, run.measurements


@pytest.mark.long
def test_live_check_and_golden_from_elsewhere_agree_bit_for_bit(
    assay: Run, setups: Path, tmp_path: Path, prompts: Path
) -> None:
    common = ("--prompts", prompts, "--max-new-tokens", "4")
    fault = ("--candidate", "cpu/bfloat16", "--candidate-setup", f"{setups}:weights_102")
    captured = assay(
        "capture", "micro:llama", "--run", "cpu/float32", "--noise-for", "bfloat16", *common
    )
    moved = captured.folder.rename(tmp_path / "elsewhere")

    live = assay(
        "check", "generate", "micro:llama", "--reference", "cpu/float32", *fault, *common,
        "--keep", "replay",
    )  # fmt: skip
    later = assay(
        "check", "generate", "micro:llama", "--golden", moved, *fault, "--keep", "verdict"
    )

    assert (captured.code, live.code, later.code) == (0, 1, 1)
    assert numbers(live) == numbers(later)
    # What was found by operations is in the verdict; traces are kept as asked, a given golden always.
    assert {path.name for path in live.folder.iterdir() if path.is_dir()} == {"golden"}
    assert (moved / "golden.json").is_file()
    assert not [path for path in later.folder.iterdir() if path.is_dir()]
    assert (later.folder / "report.html").is_file()


@pytest.mark.long
def test_golden_says_nothing_of_levels_that_it_does_not_hold(
    assay: Run, prompts: Path, tmp_path: Path
) -> None:
    golden = tmp_path / "golden"
    captured = assay(
        "capture", "micro:llama", "--run", "cpu/float32", "--noise-for", "bfloat16",
        "--level", "logits", "--prompts", prompts, "--max-new-tokens", "2", output=golden,
    )  # fmt: skip
    assert captured.code == 0, captured.stderr
    against = ("check", "generate", "micro:llama", "--golden", golden, "--candidate")

    refused = assay(*against, "cpu/bfloat16")
    asked_for = assay(*against, "cpu/bfloat16", "--level", "logits")

    assert refused.code == 2
    assert "was captured at level logits" in refused.stderr
    assert asked_for.code == 0
    assert asked_for.verdict["levels"]["modules"] == {
        "verdict": None, "reason": "checked at level logits", "compared": 0
    }  # fmt: skip


def test_shallow_check_of_a_deep_golden_stays_shallow(check: Run) -> None:
    levels = check("--level", "tokens").verdict["levels"]

    assert {name for name, level in levels.items() if level["verdict"]} == {"load", "tokens"}


@pytest.mark.long
def test_failure_stays_a_verdict_where_the_reference_s_device_is_not_here(
    assay: Run, golden: Path, setups: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(golden, elsewhere)
    manifest = json.loads((elsewhere / "golden.json").read_text())
    manifest["reference"]["run"] = "nowhere/float32"
    (elsewhere / "golden.json").write_text(json.dumps(manifest))

    run = assay(
        "check", "generate", "micro:llama", "--golden", elsewhere, "--candidate", "cpu/bfloat16",
        "--candidate-setup", f"{setups}:weights_102", "--no-verify",
    )  # fmt: skip

    assert run.code == 1
    assert run.verdict["location"]["module"] == DOWN
    assert run.verdict["location"]["op"] is None
    assert any("nowhere" in note for note in run.verdict["notes"])


def test_json_prints_the_verdict_and_nothing_else(clean: Run) -> None:
    assert json.loads(clean.stdout) == clean.verdict
    assert clean.stdout.startswith("{")
    assert "candidate" in clean.stderr


def test_every_measurement_has_both_errors_and_its_place(clean: Run) -> None:
    rows = clean.measurements

    assert {row["level"] for row in rows} >= {"inputs", "modules", "logits"}
    judged = [row for row in rows if row["limit"] and row["statistic"] in OF_STAGES]
    assert len(judged) > 300
    for row in judged:
        assert float(row["ratio"]) <= row["limit"]
        if row["actual"] and not math.isinf(float(row["ratio"])):
            assert row["ratio"] == pytest.approx(row["actual"] / row["expected"], rel=1e-9)
    tokens = [row for row in rows if row["statistic"] == "token"]
    assert {row["prompt"] for row in tokens} == set(range(8))


def test_level_that_was_not_run_says_why(assay: Run, prompts: Path) -> None:
    run = assay(
        "check", "generate", "micro:llama", "--reference", "cpu/float32",
        "--candidate", "cpu/bfloat16", "--prompts", prompts, "--max-new-tokens", "2",
        "--level", "logits",
    )  # fmt: skip

    modules = run.verdict["levels"]["modules"]
    assert (run.code, modules["verdict"]) == (0, None)
    assert "level logits" in modules["reason"]
    assert (run.folder / "golden").is_dir()
    assert (run.folder / "candidate").is_dir()


@pytest.mark.long
def test_a_module_in_inference_mode_is_judged_as_any_other(check: Run, setups: Path) -> None:
    wrong = check("--candidate-setup", f"{setups}:scaled_in_inference_mode")
    assert (wrong.code, wrong.verdict["location"]["module"]) == (1, "model.layers.1.mlp")

    assert check("--candidate-setup", f"{setups}:run_in_inference_mode").code == 0
