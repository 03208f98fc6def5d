from pathlib import Path

import pytest

from assay.files import UnreadableFileError
from assay.testing.golden import assert_passed, assert_run_passed
from assay.verdicts import Level, Outcome, Verdict
from packages.core.tests.unit.report.sample_runs import Sample, write_sample


def test_failed_run_raises_the_whole_explanation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sample = Sample(1, 2, 18, 2, "model.layers.0.mlp.down_proj")
    with pytest.raises(AssertionError) as raised:
        assert_run_passed(write_sample(Path("run"), sample))
    assert str(raised.value) == (
        "model.layers.0.mlp.down_proj (forward, step 0) differs from the reference.\n"
        "  micro:llama on cpu/bfloat16 against cpu/float32\n"
        "  relative error 4.09e-2 = 14.6x the bfloat16 noise of the same module "
        "(limit 3.0x, calibrated on 312 clean runs)\n"
        "  worst row: prompt 1, token 17, error 0.139 = 91.0x its noise\n"
        "  first token affected: prompt 0, position 3 (prefill)\n"
        "  its inputs agree (they are the reference's own): the error is made here\n"
        "  diagnosis module-error: one module computes something else from the same inputs\n"
        "Next: assay explain module-error\n"
        "Report: assay report run"
    )


def test_passed_run_raises_nothing(tmp_path: Path) -> None:
    assert assert_run_passed(write_sample(tmp_path / "run", Sample(1, 2, 18, 2, None))).passed


def test_not_compared_is_no_pass() -> None:
    level = Level(verdict=Outcome.NOT_COMPARED, reason="no golden for float16")
    verdict = Verdict(
        verdict=Outcome.NOT_COMPARED,
        reference={"run": "cpu/float32"},
        candidate={"run": "sim/float16"},
        levels={"logits": level},
    )
    with pytest.raises(AssertionError) as raised:
        assert_passed(verdict)
    assert str(raised.value) == (
        "Not everything that was asked for could be compared: this is not a pass.\n"
        "  the model on sim/float16 against cpu/float32\n"
        "  compared 0 tensor pairs\n"
        "  logits was not compared: no golden for float16"
    )


def test_folder_without_a_verdict_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFileError):
        assert_run_passed(tmp_path)
