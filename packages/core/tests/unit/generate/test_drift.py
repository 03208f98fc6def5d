"""Why a golden of another environment fails here: code, rounding, or the candidate."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.generate import check as checking
from assay.generate.capture import capture_golden
from assay.generate.drift import is_rounding, measure_drift
from assay.generate.golden import GoldenManifest, ModelIdentity, Section, read_golden
from assay.generate.judging import Judgement
from assay.generate.spec import GenerateCheck, GoldenSpec, InputOptions
from assay.judge.code_changes import CodeChange, describe_changes, find_changes
from assay.judge.results import ReplayResults
from assay.models.config_files import record_settings
from assay.runs import SilentProgress, changed_packages, describe_packages
from assay.stages import Stage
from assay.verdicts import Level, Outcome, Ratio, Verdict

RENEWAL = (
    "assay capture m/n --run cpu/float32 --noise-for bfloat16 --max-new-tokens 5 --chat --temperature 0.5"
    " --output NEW.golden"
)
THEN = {"versions": {"torch": "2.11.0", "transformers": "5.15.1", "assay-core": "0.1"}, "cpu": "a"}
NOW = {"versions": {"torch": "2.13.0", "transformers": "5.15.1", "assay-core": "0.2"}, "cpu": "a"}
MANIFEST = GoldenManifest(
    model=ModelIdentity(
        name="m/n",
        architecture="",
        weights_hash="",
        tokenizer_hash="",
        checkpoint_dtype="",
        vocab_size=1,
        num_parameters=1,
    ),
    reference={"run": "cpu/float32"},
    inputs=InputOptions(max_new_tokens=5, chat=True, sampling={"temperature": 0.5}),
    inputs_hash="",
    level="module",
    sections={
        "bfloat16": Section(
            dtype="bfloat16", yardstick_dtype="float64", reference_deterministic=True
        )
    },
    environment=THEN,
)


def test_changed_packages_are_those_with_other_versions() -> None:
    assert changed_packages(THEN, NOW) == {"torch": ("2.11.0", "2.13.0")}
    assert changed_packages(THEN, THEN | {"cpu": "b"}) == {"cpu": ("a", "b")}
    assert changed_packages({}, NOW)["transformers"] == (None, "5.15.1")
    assert describe_packages({"torch": ("1", None)}) == "torch 1 -> absent"


def results_with(error: float) -> ReplayResults:
    results = ReplayResults()
    for name, wrong in (("model.a", 0.0), ("model.b", error)):
        port = results.at(name, "output", Stage(name), "float64", "Linear")
        expected = torch.ones(4, 8, dtype=torch.float64)
        rows = torch.arange(4)
        port.sums.add(expected * (1 + wrong), expected, rows, rows)
    return results


def test_a_change_of_code_is_beyond_the_rounding_of_the_golden() -> None:
    (found,) = find_changes(results_with(1e-3), 1e-5)
    assert (found.stage, found.port) == (str(Stage("model.b")), "model.b:output")
    assert found.error == pytest.approx(1e-3)
    assert find_changes(results_with(1e-6), 1e-5) == []


def test_values_that_the_new_code_lacks_are_changes() -> None:
    results = results_with(0.0)
    results.note_missing_port("model.c", "output")
    assert find_changes(results, 1e-5) == [CodeChange("model.c:output", "", 1.0)]


def test_a_stage_is_described_once_with_its_largest_error() -> None:
    changes = [CodeChange("mlp", "a", 0.1), CodeChange("mlp", "b", 0.3)]
    changes += [CodeChange(f"layer {n}", "", 0.5) for n in range(5)]
    assert describe_changes(changes) == (
        "mlp by 0.3, layer 0 by 0.5, layer 1 by 0.5, layer 2 by 0.5 and 2 more"
    )


def test_the_environment_of_a_golden_has_its_values(tmp_path: Path) -> None:
    run = parse_run("cpu/float32")
    spec = GoldenSpec(
        model="micro:llama", reference=run, noise_for=["bfloat16"], folder=tmp_path / "golden",
        inputs=InputOptions(max_new_tokens=4),
    )  # fmt: skip
    capture_golden(spec, SilentProgress())
    check = GenerateCheck(
        model="micro:llama", candidate=parse_run("cpu/bfloat16"), golden=tmp_path / "golden"
    )
    assert measure_drift(check, SilentProgress()) == []


FAIL, PASS = (
    Judgement(
        Verdict(verdict=outcome, levels={"modules": Level(verdict=outcome)}, notes=[name]), [], [], None
    )
    for outcome, name in ((Outcome.FAIL, "against the golden"), (Outcome.PASS, "own"))
)  # fmt: skip


@pytest.mark.parametrize(
    ("ratio", "changes", "own", "outcome", "words"),
    [
        (10.5, [], PASS, Outcome.PASS, "another rounding (torch 2.11.0 -> 2.13.0) explains an error of up to 3 limits, and so does a small"),
        (1450.0, [], PASS, Outcome.FAIL, "undecided: the exact values are those of the golden, and the"),
        (
            10.5, [CodeChange("mlp", "output", 0.2)], PASS, Outcome.FAIL,
            "the model's code changed (torch 2.11.0 -> 2.13.0): mlp by 0.2",
        ),
        (10.5, [], FAIL, Outcome.FAIL, "the candidate fails against a reference of this environment as well"),
        (
            10.5, [CodeChange("mlp", "output", 0.2)], FAIL, Outcome.FAIL,
            "besides, the model's code changed",
        ),
    ],
)  # fmt: skip
def test_each_answer_has_its_outcome(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ratio: float,
    changes: list[CodeChange],
    own: Judgement,
    outcome: Outcome,
    words: str,
) -> None:
    row = Ratio("replay-tensor", ratio, 1.0, 3.5).measurement("modules", "output")
    squared = Ratio("logits-kl", ratio**2, 1.0, 2.6).measurement("logits", "output")
    replaced: dict[str, Any] = {
        "provenance": lambda: NOW,
        "call": lambda *_, **__: [changes],
        "capture_for": lambda *_: None,
        "_run_and_judge": lambda *_: own,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(checking, name, value)
    monkeypatch.setattr("assay.generate.golden.read_golden", lambda _: MANIFEST)
    check = GenerateCheck(
        model="micro:llama",
        candidate=parse_run("cpu/bfloat16"),
        golden=tmp_path / "g",
        folder=tmp_path,
    )
    judgement = replace(FAIL, measurements=[row, squared])
    found, of = checking._explain_golden(judgement, check, SilentProgress())
    assert found.verdict.verdict is outcome
    assert any(words in note for note in found.verdict.notes)
    is_renewed = any(
        one.endswith(f"apture the golden again: {RENEWAL}") for one in found.verdict.notes
    )
    is_undecided = words.startswith("undecided")
    # A recapture or a check here would hide a fault that both sides share.
    assert is_renewed == (own is PASS and not is_undecided)
    assert is_undecided == found.verdict.notes[-1].endswith(
        f"assay check generate micro:llama --reference cpu/float32 --candidate cpu/bfloat16 --candidate-python {sys.executable}"
    )
    # The verdict that holds is that of the golden only if the candidate is right here.
    assert (of.golden is not None) is (own is PASS and (bool(changes) or is_undecided))


@pytest.mark.parametrize("judgement", [PASS, FAIL], ids=["PASS", "FAIL"])
def test_changed_settings_of_the_model_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judgement: Judgement
) -> None:
    then = record_settings("micro:llama") | {
        "config.json: rms_norm_eps": 1e-3, "generation_config.json: top_k": 3,
    }  # fmt: skip
    golden = MANIFEST.model_copy(update={"environment": NOW, "settings": then})
    monkeypatch.setattr("assay.generate.golden.read_golden", lambda _: golden)
    monkeypatch.setattr(checking, "provenance", lambda: NOW)
    check = GenerateCheck(
        model="micro:llama", candidate=parse_run("cpu/bfloat16"), golden=tmp_path / "g"
    )
    found, _ = checking._explain_golden(judgement, check, SilentProgress())
    assert found.verdict.notes[len(judgement.verdict.notes) :] == [
        (
            "changed since the golden: config.json: rms_norm_eps 0.001 → 1e-06. Restore the file; if the change is"
            f" intended, capture the golden again: {RENEWAL}"
        )
    ]


def test_a_passing_candidate_and_an_equal_environment_need_no_explanation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = GenerateCheck(model="micro:llama", candidate=parse_run("cpu/bfloat16"), folder=tmp_path)
    golden = MANIFEST.model_copy(update={"environment": NOW})
    monkeypatch.setattr("assay.generate.golden.read_golden", lambda _: golden)
    monkeypatch.setattr(checking, "provenance", lambda: NOW)
    with_golden = replace(check, golden=tmp_path / "g")
    for judgement, one in ((FAIL, check), (PASS, with_golden), (FAIL, with_golden)):
        assert checking._explain_golden(judgement, one, SilentProgress()) == (judgement, one)


@pytest.mark.parametrize(
    ("content", "command"),
    [
        (MANIFEST.model_dump(by_alias=True) | {"schema": 3}, RENEWAL),
        (
            {"schema": 9, "model": []},
            "assay capture MODEL --run RUN --noise-for DTYPES --output NEW.golden",
        ),
    ],
)
def test_golden_of_another_schema_names_the_command_that_renews_it(
    tmp_path: Path, content: dict[str, Any], command: str
) -> None:
    (tmp_path / "golden.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=f"capture it again: {command}$"):
        read_golden(tmp_path)


def test_a_failure_without_measured_errors_is_not_explained_by_rounding() -> None:
    assert not is_rounding([])
