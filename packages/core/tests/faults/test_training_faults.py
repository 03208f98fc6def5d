"""Every fault of training is planted, and the check has to find its phase and place."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from assay.errors import AssayError
from assay.launch import parse_mesh
from assay.runs import SilentProgress
from assay.training.check import check_candidate, options_for, record_golden
from assay.training.reports import TrainCheck, TrainOptions
from assay.verdicts import Outcome, Verdict
from packages.core.tests.faults.second_author_corpus import second_author_corpus
from packages.core.tests.faults.training_corpus import PLANTS, TrainingFault, training_corpus
from packages.core.tests.trials.tables import markdown_table, number, publish
from packages.core.tests.trials.trial import run_all

# Requirements on the whole corpus.
SHARE_DETECTED = {"float32": 0.95, "bfloat16": 0.85, "float16": 0.85}
SHARE_LOCATED = 0.9
SHARE_DIAGNOSED = 0.85


@dataclass(frozen=True)
class Work:
    """A golden to be recorded, or a candidate to be checked against one."""

    fault: TrainingFault
    folder: Path

    @property
    def golden(self) -> Path:
        """One for all that are trained alike."""
        options = self.check.options
        kind = f"lora-{options.adapter_dropout:g}" if options.lora else "full"
        model = options.model.removeprefix("micro:")
        name = f"{model}-{self.fault.dtype}-{kind}-{options.shapes}-{options.micro_batches}"
        return self.folder / name / "golden"

    @property
    def check(self) -> TrainCheck:
        fault = self.fault
        mesh = parse_mesh(fault.mesh) if fault.mesh else {}
        options = TrainOptions(
            model=fault.model, lora=fault.lora, micro_batches=fault.micro_batches
        )
        options = options_for(options, mesh, fault.features)
        if fault.adapter_dropout is not None:
            options = options.model_copy(update={"adapter_dropout": fault.adapter_dropout})
        return TrainCheck(
            options,
            "cpu/float32",
            f"cpu/{fault.dtype}",
            trainer=fault.trainer,
            setup=fault.setup,
            mesh=mesh,
            features=fault.features,
        )


@dataclass(frozen=True)
class Finding:
    """A fault and the verdict on it."""

    fault: TrainingFault
    verdict: Verdict

    @property
    def detected(self) -> bool:
        return self.verdict.verdict is Outcome.FAIL

    @property
    def located(self) -> bool:
        """Whether the phase is right, and the module where there is a single one."""
        location, fault = self.verdict.location, self.fault
        return (
            location is not None
            and location.phase == fault.phase
            and (fault.module is None or location.module == fault.module)
        )

    @property
    def diagnosed(self) -> bool:
        return self.verdict.diagnosis == self.fault.diagnosis


def whole_corpus() -> list[TrainingFault]:
    return [*training_corpus(), *second_author_corpus()]


def record(work: Work) -> None:
    record_golden(work.check, work.golden, SilentProgress())


def judge(work: Work) -> Verdict:
    folder = work.folder / "trials" / work.fault.name.replace(":", "-").replace(" ", "-")
    folder.mkdir(parents=True)
    try:
        return check_candidate(work.check, work.golden, folder, SilentProgress())
    except AssayError as error:  # not found, and the others go on
        return Verdict(verdict=Outcome.NOT_COMPARED, notes=[f"no verdict: {error}"])


def examine(faults: Sequence[TrainingFault], folder: Path) -> Iterator[Finding]:
    works = [Work(fault, folder) for fault in faults]
    run_all(record, list({work.golden: work for work in works}.values()))
    for fault, verdict in zip(faults, run_all(judge, works), strict=True):
        yield Finding(fault, verdict)


@pytest.fixture(scope="module")
def findings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Finding]:
    wanted = request.config.getoption("--training-fault")
    if request.config.getoption("--fault") and not wanted:
        pytest.skip("--fault chooses faults of generation alone")
    chosen = [fault for fault in whole_corpus() if wanted in fault.name]
    if not chosen:
        names = ", ".join(sorted({fault.plant for fault in whole_corpus()}))
        pytest.fail(f"--training-fault {wanted}: no fault has such a name; there are: {names}")
    found = list(examine(chosen, tmp_path_factory.mktemp("faults")))
    text = f"{table(found)}\n\n{totals(found)}"
    request.config.get_terminal_writer().line(f"\n{text}")
    if request.config.getoption("--publish"):
        publish("training-faults", totals(found), training_faults=table(found))
    return found


def table(findings: Sequence[Finding]) -> str:
    head = ("fault", "dtype", "mesh", "found", "place right", "phase", "module or parameter", "diagnosis",
            "statistic", "ratio", "limit")  # fmt: skip
    return markdown_table(head, [row_of(finding) for finding in findings])


def row_of(finding: Finding) -> tuple[str, ...]:
    fault, verdict, location = finding.fault, finding.verdict, finding.verdict.location
    return (
        fault.plant,
        fault.dtype,
        fault.mesh,
        "yes" if finding.detected else "no",
        "yes" if finding.located else "no",
        location.phase if location else "",
        (location.parameter or location.module or "") if location else "",
        f"{verdict.diagnosis or ''}{'' if finding.diagnosed else f' ({fault.diagnosis})'}",
        verdict.statistic or "",
        number(verdict.noise_ratio),
        number(verdict.limit),
    )


def totals(findings: Sequence[Finding]) -> str:
    lines = []
    for dtype in dict.fromkeys(finding.fault.dtype for finding in findings):
        some = [finding for finding in findings if finding.fault.dtype == dtype]
        counts = [
            sum(getattr(finding, what) for finding in some)
            for what in ("detected", "located", "diagnosed")
        ]
        lines.append(
            f"{dtype}: of {len(some)} faults {counts[0]} are found, {counts[1]} at the right place,"
            f" {counts[2]} with the right diagnosis."
        )
    return "\n".join(lines)


def names(findings: Sequence[Finding]) -> list[str]:
    return [
        f"{one.fault.name} -> {one.verdict.location} {one.verdict.diagnosis}" for one in findings
    ]


def test_names_are_unique_and_every_plant_is_there() -> None:
    faults = whole_corpus()

    assert len({fault.name for fault in faults}) == len(faults)
    for fault in faults:
        file, _, name = fault.plant.partition(":")
        kind = "class" if name[0].isupper() else "def"
        assert f"\n{kind} {name}(" in (PLANTS / f"{file}.py").read_text(encoding="utf-8")


def test_optimizer_that_plants_change_is_right_without_them(tmp_path: Path) -> None:
    clean = TrainingFault(
        "second_author:OptimizerByHand", "float32", "optimizer", "optimizer-update"
    )
    work = Work(clean, tmp_path)
    record(work)

    assert judge(work).verdict is Outcome.PASS


@pytest.mark.parametrize("dtype", SHARE_DETECTED)
def test_faults_are_found(findings: list[Finding], dtype: str) -> None:
    some = [finding for finding in findings if finding.fault.dtype == dtype]
    if not some:
        pytest.skip(f"no fault in {dtype} was chosen")
    missed = [finding for finding in some if not finding.detected]

    assert len(missed) <= (1 - SHARE_DETECTED[dtype]) * len(some), names(missed)


def test_phase_and_place_are_right(findings: list[Finding]) -> None:
    wrong = [finding for finding in findings if finding.detected and not finding.located]

    assert len(wrong) <= (1 - SHARE_LOCATED) * len(findings), names(wrong)


def test_most_diagnoses_are_those_of_the_corpus(findings: list[Finding]) -> None:
    wrong = [finding for finding in findings if finding.detected and not finding.diagnosed]

    assert len(wrong) <= (1 - SHARE_DIAGNOSED) * len(findings), names(wrong)
