"""`assay check generate` from the outside: two processes, one verdict, files in a folder."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from assay.errors import UsageError
from assay.generate.requests import CandidateRequest, CaptureRequest, InputOptions, Level
from assay.runs import Answer, Progress, provenance, run_process
from assay.runs.folders import write_whole
from assay.verdicts import Measurement, Verdict

WORKER = "assay.generate.worker"
VERDICT_FILE = "verdict.json"
MEASUREMENTS_FILE = "measurements.jsonl"


@dataclass(frozen=True, slots=True)
class GenerateCheck:
    """What is checked. Exactly one of `reference` and `golden` is given."""

    model: str
    candidate: str
    reference: str | None = None
    golden: Path | None = None
    inputs: InputOptions = field(default_factory=InputOptions)
    level: Level = "modules"
    setup: str | None = None
    options: dict[str, str] = field(default_factory=dict)
    limits: str = "noise"
    trust_remote_code: bool = False


def capture(request: CaptureRequest, folder: Path, progress: Progress) -> Answer:
    """Capture a golden in a process of its own; logs go to `folder`."""
    wrapped = {"kind": "capture", "request": request.model_dump()}
    return run_process(WORKER, wrapped, folder, name="reference", progress=progress)


def check_generate(check: GenerateCheck, folder: Path, progress: Progress) -> Verdict:
    """Run both sides, judge, and write verdict.json and measurements.jsonl into `folder`."""
    candidate_dtype = check.candidate.rpartition("/")[2]
    golden = check.golden
    if golden is None:
        if check.reference is None:
            raise UsageError("a check needs --reference RUN or --golden TRACE")
        golden = folder / "golden"
        request = CaptureRequest(
            model=check.model,
            reference=check.reference,
            noise_for=[candidate_dtype],
            inputs=check.inputs,
            level=check.level,
            folder=str(golden),
            trust_remote_code=check.trust_remote_code,
        )
        capture(request, folder, progress)
    candidate = CandidateRequest(
        model=check.model,
        candidate=check.candidate,
        golden=str(golden),
        folder=str(folder / "candidate"),
        setup=check.setup,
        options=check.options,
        trust_remote_code=check.trust_remote_code,
    )
    answer = run_process(
        WORKER,
        {"kind": "candidate", "request": candidate.model_dump()},
        folder,
        name="candidate",
        progress=progress,
    )
    verdict, measurements = judge(golden, candidate_dtype, folder / "candidate", answer, check.limits)
    verdict = verdict.model_copy(update={"command": sys.argv, "environment": provenance()})
    write_measurements(folder / MEASUREMENTS_FILE, measurements)
    write_whole(folder / VERDICT_FILE, verdict.to_json())
    return verdict


def judge(
    golden: Path, dtype: str, candidate: Path, answer: Answer, limits: str
) -> tuple[Verdict, list[Measurement]]:
    """The verdict over a candidate's results, and the measurements behind it."""
    from assay.comparing.limits import load_limits  # noqa: PLC0415 - torch, but not for --help
    from assay.generate.golden import GoldenSection, read_golden  # noqa: PLC0415
    from assay.generate.judging import Judgement  # noqa: PLC0415
    from assay.generate.requests import CandidateReport  # noqa: PLC0415
    from assay.trace import Trace  # noqa: PLC0415

    judgement = Judgement(
        read_golden(golden),
        GoldenSection.open(golden, dtype),
        Trace.open(candidate),
        CandidateReport.model_validate(answer.result),
        load_limits(limits),
    )
    return judgement.judge(), judgement.measurements


def write_measurements(path: Path, measurements: Sequence[Measurement]) -> None:
    """One JSON object a line."""
    write_whole(path, "".join(row.model_dump_json() + "\n" for row in measurements))
