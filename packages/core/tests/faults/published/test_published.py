"""Every published bug that can be planted here is found, where it is, and told as what it is."""

import importlib.util
from collections.abc import Sequence

import pytest

from assay.verdicts import Outcome
from packages.core.tests.faults.published.corpus import (
    choose_bugs,
    planted_bugs,
    published_bugs,
)
from packages.core.tests.faults.published.findings import Finding, examine
from packages.core.tests.faults.published.table import findings_table, not_planted_table, totals
from packages.core.tests.trials.tables import publish

# Of those that are planted: found or declared, at their place, with their diagnosis.
SHARES = {"float32": (1.0, 0.95, 0.9), "bfloat16": (0.95, 0.9, 0.85)}


@pytest.fixture(scope="module")
def findings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Finding]:
    chosen = choose_bugs(request.config.getoption("--published-bug"))
    found = list(examine(chosen, tmp_path_factory.mktemp("published")))
    text = f"{findings_table(found)}\n\n{totals(found)}"
    request.config.get_terminal_writer().line(f"\n{text}")
    if request.config.getoption("--publish"):
        publish(
            "published-bugs",
            totals(found),
            published_bugs=findings_table(found),
            published_bugs_not_planted=not_planted_table(),
        )
    return found


def of_dtype(findings: Sequence[Finding], dtype: str) -> list[Finding]:
    chosen = [one for one in findings if one.dtype == dtype]
    if not chosen:
        pytest.skip(f"no bug in {dtype} was chosen")
    return chosen


def names(findings: Sequence[Finding]) -> list[str]:
    return [f"{one.name} -> {one.verdict.location} {one.verdict.diagnosis}" for one in findings]


def test_every_bug_is_planted_or_has_a_reason() -> None:
    planted = {one.bug for one in planted_bugs()}
    reasons = {name for name, bug in published_bugs().items() if bug.not_planted}

    assert planted | reasons == set(published_bugs())
    assert not planted & reasons


def test_plants_and_controls_are_there() -> None:
    for one in planted_bugs():
        for plant in (one.plant, one.control):
            path, _, name = one.reference_of(plant).rpartition(":")
            spec = importlib.util.spec_from_file_location("plants", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            assert callable(getattr(module, name)), f"{path}: {name}"


def test_controls_pass(findings: list[Finding]) -> None:
    failed = [one for one in findings if one.control.verdict is not Outcome.PASS]

    assert not [f"{one.name}: {one.control.location} {one.control.notes}" for one in failed]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bugs_are_found_or_declared(findings: list[Finding], dtype: str) -> None:
    chosen = of_dtype(findings, dtype)
    missed = [one for one in chosen if not one.found and not one.declared]

    assert len(missed) <= (1 - SHARES[dtype][0]) * len(chosen), names(missed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bugs_are_found_at_their_place(findings: list[Finding], dtype: str) -> None:
    chosen = [one for one in of_dtype(findings, dtype) if not one.declared]
    wrong = [one for one in chosen if not one.placed]

    assert len(wrong) <= (1 - SHARES[dtype][1]) * len(chosen), names(wrong)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bugs_are_diagnosed(findings: list[Finding], dtype: str) -> None:
    chosen = [one for one in of_dtype(findings, dtype) if not one.declared]
    wrong = [one for one in chosen if not one.diagnosed]

    assert len(wrong) <= (1 - SHARES[dtype][2]) * len(chosen), names(wrong)
