"""`assay bench selftest` tunes in two ways, and passes if both match their baselines."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from assay.api.verdict import CheckedVerdict
from assay.runs import SilentProgress
from assay.verdicts import Outcome
from assay_bench import self_test
from assay_bench.self_test import run_self_test

PASS, FAIL, OTHER = Outcome.PASS, Outcome.FAIL, Outcome.NOT_COMPARED


@pytest.fixture
def asked() -> list[str]:
    """What was tuned, evaluated, compared and shown, in order."""
    return []


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: list[str]
) -> Callable[..., Outcome]:
    """Run the self-test; the tuning and the two comparisons end as given."""

    def run(
        *judged: Outcome, learned: Outcome = Outcome.PASS, alone: Outcome = Outcome.PASS
    ) -> Outcome:
        outcomes = iter(judged)

        def tune(recipe: Any, _sources: Path, folder: Path, *_: Any) -> Any:
            asked.append(f"tune {recipe.run} into {folder.relative_to(tmp_path)}")
            return SimpleNamespace(verdict=learned)

        def evaluate(request: Any, _: Any) -> None:
            model = Path(request.model).relative_to(tmp_path)
            asked.append(f"ask {model} on {request.run} about {len(request.suite.tasks)} tasks")

        def compare(baseline: Path, actual: Path, *_: Any) -> Any:
            assert baseline.is_file()
            asked.append(f"compare {baseline.name} {actual.relative_to(tmp_path)}")
            return SimpleNamespace(judged=next(outcomes))

        def publish(folder: Path) -> Any:
            asked.append(f"write the page of {folder.relative_to(tmp_path)}")
            return SimpleNamespace(headline="Decided.")

        monkeypatch.setattr(self_test, "run_tunings", tune)
        monkeypatch.setattr(self_test, "evaluate", evaluate)
        monkeypatch.setattr(self_test, "read_sides", lambda *sides: sides[:2])
        monkeypatch.setattr(self_test, "write_comparison", compare)
        monkeypatch.setattr(self_test, "read_evaluation", lambda _folder: None)
        monkeypatch.setattr(self_test, "judge_scores", lambda _: SimpleNamespace(verdict=alone))
        monkeypatch.setattr(self_test, "write_results", lambda verdict, *_: verdict)
        monkeypatch.setattr(CheckedVerdict, "publish", publish)
        return run_self_test("card/float32", tmp_path, SilentProgress())

    return run


def test_both_ways_are_tuned_and_held_to_their_baselines_on_the_device(
    run: Callable[..., Outcome], asked: list[str]
) -> None:
    assert run(PASS, PASS) is Outcome.PASS
    assert asked == [
        "tune card/float32 into tuned",
        "write the page of tuned",
        "ask tuned/micro-llama/full/seed-0/model on card/float32 about 4 tasks",
        "write the page of full/asked",
        "compare micro-llama-full.json full/asked",
        "write the page of full/compared",
        "ask tuned/micro-llama/lora/seed-0/model on card/float32 about 4 tasks",
        "write the page of lora/asked",
        "compare micro-llama-lora.json lora/asked",
        "write the page of lora/compared",
    ]


@pytest.mark.parametrize(
    ("judged", "outcome"),
    [
        ((PASS, FAIL), Outcome.FAIL),
        ((PASS, OTHER), Outcome.NOT_COMPARED),
        ((OTHER, FAIL), Outcome.FAIL),
    ],
)
def test_the_worst_outcome_counts(
    run: Callable[..., Outcome], judged: tuple[Outcome, ...], outcome: Outcome
) -> None:
    assert run(*judged) is outcome


@pytest.mark.parametrize("alone", [Outcome.FAIL, Outcome.NOT_COMPARED])
def test_answers_that_do_not_pass_by_themselves_are_not_a_pass(
    run: Callable[..., Outcome], alone: Outcome
) -> None:
    assert run(PASS, PASS, alone=alone) is alone


def test_a_model_that_learned_too_little_is_asked_nothing(
    run: Callable[..., Outcome], asked: list[str]
) -> None:
    assert run(learned=Outcome.FAIL) is Outcome.FAIL
    assert asked == ["tune card/float32 into tuned", "write the page of tuned"]
