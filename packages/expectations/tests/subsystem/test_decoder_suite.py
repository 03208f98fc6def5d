"""The suite of decoders, run with pytest, options and the published variables."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay.judge.limits import calibrate_thresholds, read_clean_tokens
from assay.runs import SilentProgress
from assay.verdicts import Outcome, Verdict
from assay_expectations.decoders import DecoderCheck, DecoderOptions, Shape, Thresholds

Check = Callable[..., Verdict]

SETUPS = """
import torch

def poison(model):
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    return model


def poison_rank_1(model):
    return poison(model) if torch.distributed.get_rank() == 1 else model
"""

VARIABLES = {
    "FMS_TEST_SHAPES_COMMON_MODEL_PATHS": "meta-llama/Llama-3.1-8B-Instruct",
    "FMS_TEST_SHAPES_COMMON_BATCH_SIZES": "2",
    "FMS_TEST_SHAPES_COMMON_SEQ_LENGTHS": "16",
    "FMS_TEST_SHAPES_COMMON_MAX_NEW_TOKENS": "4",
}
PROMPTS = '{"prompt": "How does a compiler work?"}'

pytestmark = pytest.mark.timeout(300)


def run_suite(tmp_path: Path, *options: str, **variables: str) -> tuple[int, str]:
    kept = {"FMS_TEST_SHAPES_VALIDATION_INFO_DIR": str(tmp_path / "references")}
    given = {f"FMS_TEST_SHAPES_{name}": value for name, value in variables.items()}
    words = ["--pyargs", "assay_expectations.suites", "-k", "decoders", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *words, "--assay-device", "cpu/float16", *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | VARIABLES | kept | given,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long
def test_the_published_variables_run_the_suite(tmp_path: Path) -> None:
    code, output = run_suite(tmp_path, METRICS_THRESHOLD="1e-9,1000")
    assert code == 1
    # The ladder passes. A threshold below all tokens fails.
    assert re.search(r"cross_entropy: 100\.00% of the tokens are at or over 1e-09", output), output


@pytest.mark.long
def test_usage_error_is_one_message(tmp_path: Path) -> None:
    code, output = run_suite(tmp_path, COMMON_BATCH_SIZES="four")
    assert code != 0
    assert "FMS_TEST_SHAPES_COMMON_BATCH_SIZES is 'four'; expected: positive integers" in output
    assert "passed" not in output


@pytest.mark.long
def test_torchrun_shards_models_and_every_process_reports(
    tmp_path: Path,
) -> None:
    setups = tmp_path / "setups.py"
    setups.write_text(SETUPS)
    words = ["--pyargs", "assay_expectations.suites", "-k", "decoders", "-p", "no:cacheprovider"]
    shapes = ["--decoder-shape", "1x8x2", "--decoder-shape", "1x100000x2"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--redirects", "3", "--log-dir", str(tmp_path / "logs")),
            *("-m", "pytest", "-q", *words, *shapes, "--decoder-setup", f"{setups}:poison_rank_1"),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    outputs = [path.read_text() for path in sorted((tmp_path / "logs").rglob("stdout.log"))]
    assert len(outputs) == 2, done.stderr
    for output in outputs:
        assert "each of 2 ranks is judged; FAIL: rank 1" in output
        assert "lm_head, parameter weight" in output
        assert "2 failed" in output
        assert re.search("tokens and 2 new ones are over the model's context of 2048", output)
    assert "rank 0: UsageError: " in outputs[1]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Checks of a small shape, each in its own folder, with cached references."""

    def run(
        name: str,
        setup: str | None = None,
        prompts: Path | None = None,
        attention: str = "default",
    ) -> Verdict:
        folder = tmp_path / name
        folder.mkdir()
        options = DecoderOptions(references=tmp_path / "references", prompts=prompts)
        shape = Shape(2, 16, 4)
        return DecoderCheck(
            "micro:llama", shape, "cpu/float16", folder, options, setup, attention
        ).run(SilentProgress())

    return run


@pytest.mark.long
def test_reference_is_reused_only_for_the_same_prompts(tmp_path: Path, check: Check) -> None:
    assert check("clean", attention="eager").verdict is Outcome.PASS
    (first,) = (tmp_path / "references").iterdir()
    captured = (first / "golden.json").stat().st_mtime_ns

    setups = tmp_path / "setups.py"
    setups.write_text(SETUPS)
    assert check("poisoned", f"{setups}:poison").verdict is Outcome.FAIL
    assert [*first.parent.iterdir()] == [first]
    assert (first / "golden.json").stat().st_mtime_ns == captured

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(PROMPTS)
    assert check("other", prompts=prompts).verdict is Outcome.PASS
    assert len([*first.parent.iterdir()]) == 2


@pytest.mark.long
def test_trusted_device_passes_its_calibrated_thresholds(tmp_path: Path) -> None:
    shape = Shape(2, 16, 4)
    options = DecoderOptions(references=tmp_path / "references")
    checks = []
    for name in "first", "again":
        (tmp_path / name).mkdir()
        checks.append(DecoderCheck("micro:llama", shape, "cpu/float16", tmp_path / name, options))
    assert checks[0].run(SilentProgress()).verdict is Outcome.PASS
    measured = checks[0].results / "measurements.jsonl"
    thresholds = calibrate_thresholds([read_clean_tokens(measured)])

    again = replace(checks[1], options=replace(options, thresholds=Thresholds(metrics=thresholds)))
    assert again.run(SilentProgress()).verdict is Outcome.PASS
    assert again.exceeded_thresholds() == []


def test_shape_beyond_the_context_is_an_error(tmp_path: Path) -> None:
    wide = DecoderCheck("micro:llama", Shape(1, 4000, 4), "cpu/float16", tmp_path, DecoderOptions())
    with pytest.raises(UsageError, match=r"over the model's context of 2048"):
        wide.run(SilentProgress())
