"""The suite whose margins judge a comparison."""

from dataclasses import replace

import pytest

from assay.errors import UsageError
from assay_bench.comparing import SuiteTerms, Terms, choose_terms
from assay_bench.results import Evaluation
from packages.bench.tests.unit.sample_evaluations import answered, evaluation


def of_suite(name: str | None, accuracy: float = 0.01) -> Evaluation:
    side = evaluation(answered(9, 9))
    if name is None:
        return side
    return replace(side, facts={"suite": {"name": name, "terms": {"accuracy": accuracy}}})


OFFLINE = SuiteTerms(name="offline", terms=Terms(accuracy=0.03))
GIVEN = SuiteTerms(name="lax.toml", terms=Terms(accuracy=0.5))


@pytest.mark.parametrize(
    ("base", "candidate", "given", "accuracy", "told"),
    [
        (of_suite("s.toml"), of_suite("s.toml"), None, 0.01, "margins: suite s.toml (of the base)"),
        (
            of_suite("s.toml"),
            of_suite("t", 0.2),
            None,
            0.01,
            "margins: suite s.toml (of the base), not suite t of the candidate",
        ),
        (
            of_suite(None),
            of_suite("t", 0.2),
            None,
            0.03,
            "margins: suite offline (default), not suite t of the candidate",
        ),
        (
            of_suite(None),
            of_suite(None),
            None,
            0.03,
            "margins: suite offline (default)",
        ),
        (
            of_suite("s.toml"),
            of_suite("s.toml"),
            GIVEN,
            0.5,
            "margins: suite lax.toml (--suite), not suite s.toml of the base",
        ),
    ],
)
def test_suite_of_the_base_judges(
    base: Evaluation,
    candidate: Evaluation,
    given: SuiteTerms | None,
    accuracy: float,
    told: str,
) -> None:
    terms, note = choose_terms(base, candidate, given, OFFLINE)
    assert terms.accuracy == accuracy
    used = given or SuiteTerms.of(base) or OFFLINE
    assert terms.sources["accuracy"] == f"suite {used.name}"
    assert note == told


def test_invalid_recorded_suite_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="model: invalid suite: "):
        choose_terms(of_suite("s", -1.0), of_suite("s"), None, OFFLINE)
