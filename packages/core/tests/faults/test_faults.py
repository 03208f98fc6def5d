"""Every fault of the corpus is planted, and the check has to find it where it is."""

from pathlib import Path

import pytest

from packages.core.tests.faults.corpus import choose_faults, corpus
from packages.core.tests.faults.findings import Finding, examine, findings_table, totals
from packages.core.tests.trials.tables import publish

FLOAT32_SHARE_LOCATED = 0.95
BFLOAT16_SHARE_LOCATED = 0.9


@pytest.fixture(scope="module")
def findings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Finding]:
    chosen = choose_faults(request.config.getoption("--fault"))
    device = request.config.getoption("--device")
    found = list(examine(chosen, tmp_path_factory.mktemp("faults"), device))
    text = f"{findings_table(found)}\n\n{totals(found)}"
    request.config.get_terminal_writer().line(f"\n{text}")
    if request.config.getoption("--publish"):
        publish("faults", totals(found), faults=findings_table(found))
    return found


def of_dtype(findings: list[Finding], dtype: str) -> list[Finding]:
    chosen = [finding for finding in findings if finding.fault.dtype == dtype]
    if not chosen:
        pytest.skip(f"no fault in {dtype} was chosen")
    return chosen


def names(findings: list[Finding]) -> list[str]:
    return [f"{finding.fault.name} -> {finding.place}" for finding in findings]


def test_names_are_unique_and_every_plant_is_used() -> None:
    faults = list(corpus())
    assert len({fault.name for fault in faults}) == len(faults)
    used = {Path(fault.setup.rpartition(":")[0]) for fault in faults}
    assert used == set((Path(__file__).parent / "plants").glob("*.py"))


def test_unknown_fault_name_is_refused() -> None:
    assert len(choose_faults("")) == len(list(corpus()))
    assert {fault.plant for fault in choose_faults("layers:other_gelu")} == {"layers:other_gelu"}
    with pytest.raises(pytest.UsageError, match=r"^--fault other_gleu: no fault has .*other_gelu"):
        choose_faults("other_gleu")


def test_every_plant_changes_a_number(findings: list[Finding]) -> None:
    assert not names([finding for finding in findings if finding.vacuous])


def test_every_fault_in_float32_is_found(findings: list[Finding]) -> None:
    assert not names([one for one in of_dtype(findings, "float32") if not one.detected])


@pytest.mark.parametrize(
    ("dtype", "share"),
    [("float32", FLOAT32_SHARE_LOCATED), ("bfloat16", BFLOAT16_SHARE_LOCATED)],
)
def test_faults_are_found_in_the_right_module(
    findings: list[Finding], dtype: str, share: float
) -> None:
    chosen = of_dtype(findings, dtype)
    wrong = [one for one in chosen if not one.located]
    assert len(wrong) <= (1 - share) * len(chosen), names(wrong)


def test_what_is_missed_is_below_the_resolution_that_was_stated(findings: list[Finding]) -> None:
    missed = [one for one in findings if not one.detected]
    assert not names([one for one in missed if not one.declared])


def test_diagnoses_are_those_of_the_corpus(findings: list[Finding]) -> None:
    wrong = [
        f"{one.fault.name}: {one.outcome.verdict.diagnosis} instead of {one.fault.diagnosis}"
        for one in findings
        if one.located and one.outcome.verdict.diagnosis != one.fault.diagnosis
    ]
    assert not wrong
