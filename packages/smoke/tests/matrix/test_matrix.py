"""The cases of a plan as tests by id: `pytest packages/smoke/tests/matrix -k fsdp-2`."""

from pathlib import Path

import pytest

from assay.launch import TimeLimits
from assay.runs import SilentProgress
from assay.verdicts import Outcome
from assay_smoke.cases.running import CaseRun
from assay_smoke.matrix.rules import Case, plan_smoke

LIMITS = TimeLimits(start_seconds=300.0, collective_seconds=60.0, body_seconds=300.0)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    plan = plan_smoke(coverage=option("--coverage"), cards=option("--cards"))
    cases = [planned.case for planned in plan.cases]
    metafunc.parametrize("case", cases, ids=[case.id for case in cases])


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("references")


def test_case_passes(
    case: Case, tmp_path: Path, references: Path, request: pytest.FixtureRequest
) -> None:
    device = request.config.getoption("--device")

    verdict = CaseRun(case, device, references, limits=LIMITS).run(tmp_path, SilentProgress())

    wrong = {
        name: level.reason
        for name, level in verdict.levels.items()
        if level.verdict is not None and level.verdict is not Outcome.PASS
    }
    assert verdict.verdict is Outcome.PASS, wrong
