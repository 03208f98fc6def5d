"""The fixture `golden` in real pytest runs on a micro model."""

from pathlib import Path

import pytest

pytest_plugins = ("pytester",)

BODY = """
def test_llama(golden):
    golden.check("micro:llama", prompts="prompts.jsonl", max_new_tokens={tokens}{setup})
"""
PROMPTS = '{"text": "def read_lines(path):"}\n{"text": "import os"}\n'
PLANT = """
import torch

def plant(model):
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight *= 1.02
    return model
"""


def run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *options)


def write_test(pytester: pytest.Pytester, tokens: int = 4, setup: str = "") -> None:
    pytester.makepyfile(test_model=BODY.format(tokens=tokens, setup=setup))


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.delenv("ASSAY_REQUIRE_HARDWARE", raising=False)
    # Where it is set, pytest repeats whole messages in its summary.
    monkeypatch.delenv("CI", raising=False)
    (pytester.path / "prompts.jsonl").write_text(PROMPTS)
    (pytester.path / "plant.py").write_text(PLANT)
    write_test(pytester)
    return pytester


@pytest.mark.long
def test_a_golden_is_asked_for_captured_and_held_to(project: pytest.Pytester) -> None:
    folder = project.path / "goldens/test_model/test_llama"
    absent = run(project)
    absent.assert_outcomes(failed=1)
    absent.stdout.fnmatch_lines([f"there is no golden in {folder}; capture it *"])
    assert absent.stdout.str().count("capture it on a trusted device") == 1

    capturing = run(project, "--capture-expectation")
    capturing.assert_outcomes(failed=1)
    capturing.stdout.fnmatch_lines(
        [f"E*GoldenSaved: the golden is saved in {folder}; run again without --capture-expectation"]
    )
    run(project).assert_outcomes(passed=1)

    write_test(project, setup=', setup="plant.py:plant"')
    failing = run(project)
    failing.assert_outcomes(failed=1)
    failing.stdout.fnmatch_lines(
        [
            "E*AssertionError: model.layers.1.mlp.down_proj*(forward, step 0) differs from the *",
            "E         micro:llama on cpu/float32 against cpu/float32",
            "E*relative error 2e-2 = *x the float32 noise of the same module (limit *",
            "E       Next: assay explain weight-mismatch",
            "E       Report: assay report /*/assay",
        ]
    )
    text = failing.stdout.str()
    assert (text.count("against cpu/float32"), text.count("assay report")) == (1, 1)
    failing.stdout.no_fnmatch_line("*golden.py*")  # the frames between are hidden

    write_test(project, tokens=5)
    other = run(project)
    other.stdout.fnmatch_lines(
        ["the golden has other inputs: it was captured with max_new_tokens=*"]
    )
    other.stdout.no_fnmatch_line("*Error*")  # a line, and no traceback


@pytest.mark.long
def test_prompts_that_changed_since_the_capture_fail(project: pytest.Pytester) -> None:
    run(project, "--capture-expectation")
    prompts = project.path / "prompts.jsonl"
    prompts.write_text(PROMPTS + '{"text": "one more"}\n')

    result = run(project)

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["the golden has other inputs: the prompts have changed since; *"])


@pytest.mark.long
def test_a_golden_of_no_test_fails_the_others(project: pytest.Pytester) -> None:
    stale = project.path / "goldens/test_model/test_gone"
    stale.mkdir(parents=True)
    result = run(project)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*no test uses these goldens; delete them: {stale}"])
    # Of a test that is named alone, the others are not known.
    run(project, "test_model.py::test_llama").stdout.no_fnmatch_line("*no test uses*")


def test_a_golden_of_a_test_left_out_is_not_stale(project: pytest.Pytester) -> None:
    Path(project.path / "goldens/test_model/test_llama").mkdir(parents=True)
    result = run(project, "-k", "nothing")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
