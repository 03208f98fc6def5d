"""Every fault of the corpus as a dump: the comparison of files has to locate it."""

import pytest

from packages.core.tests.faults.corpus import choose_faults
from packages.core.tests.faults.offline_faults import (
    Mode,
    OfflineFinding,
    examine,
    offline_table,
    offline_totals,
)
from packages.core.tests.trials.tables import publish

# Shares of all faults; the live check locates all in float32 and 96 % in bfloat16.
SHARES_LOCATED: dict[tuple[Mode, str], float] = {
    ("model", "float32"): 0.95,
    ("model", "bfloat16"): 0.9 * 0.96,
    ("noise", "float32"): 0.9,
    ("noise", "bfloat16"): 0.65 * 0.96,
}


@pytest.fixture(scope="module")
def findings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[OfflineFinding]:
    chosen = choose_faults(request.config.getoption("--fault"))
    found = list(examine(chosen, tmp_path_factory.mktemp("dumps")))
    totals = offline_totals(found)
    request.config.get_terminal_writer().line(f"\n{offline_table(found)}\n\n{totals}")
    if request.config.getoption("--publish"):
        missed = offline_table([one for one in found if not one.located])
        publish("offline faults", totals, offline_faults_missed=missed)
    return found


@pytest.mark.parametrize(("mode", "dtype"), SHARES_LOCATED)
def test_faults_are_located_in_the_right_module(
    findings: list[OfflineFinding], mode: Mode, dtype: str
) -> None:
    chosen = [
        one for one in findings if (one.mode, one.fault.dtype) == (mode, dtype) and one.is_in_dump
    ]
    if not chosen:
        pytest.skip(f"no fault in {dtype} was chosen")
    wrong = [one for one in chosen if not one.located]
    assert len(wrong) <= (1 - SHARES_LOCATED[mode, dtype]) * len(chosen), offline_table(wrong)
