"""`assay check generate` from the outside: two processes, one verdict, files in a folder."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from assay.errors import UsageError
from assay.generate.requests import CandidateRequest, CaptureRequest, CloserRequest, InputOptions, Level, RemoteCode
from assay.runs import Answer, Progress, provenance, run_process
from assay.runs.folders import write_whole
from assay.verdicts import Measurement, Verdict

if TYPE_CHECKING:
    from assay.generate.judging import Judgement

WORKER = "assay.generate.worker"
# What both sides import before they run: a check then pays for it once.
PRELOAD = ("assay.generate.preload",)
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
    remote_code: RemoteCode = "refuse"


def capture(request: CaptureRequest, folder: Path, progress: Progress) -> Answer:
    """Capture a golden in a process of its own; logs go to `folder`."""
    wrapped = {"kind": "capture", "request": request.model_dump()}
    return run_process(WORKER, wrapped, folder, name="reference", progress=progress, preload=PRELOAD)


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
            remote_code=check.remote_code,
        )
        capture(request, folder, progress)
    candidate = CandidateRequest(
        model=check.model,
        candidate=check.candidate,
        golden=str(golden),
        folder=str(folder / "candidate"),
        setup=check.setup,
        options=check.options,
        remote_code=check.remote_code,
    )
    answer = run_process(
        WORKER,
        {"kind": "candidate", "request": candidate.model_dump()},
        folder,
        name="candidate",
        progress=progress,
        preload=PRELOAD,
    )
    judgement = judge(golden, candidate_dtype, folder / "candidate", answer, check.limits)
    verdict = judgement.verdict
    if judgement.origin is not None and judgement.call is not None:
        operation = find_operation(check, golden, candidate, judgement, folder, progress)
        if operation is not None and verdict.location is not None:
            location = verdict.location.model_copy(update={"op": operation})
            verdict = verdict.model_copy(update={"location": location})
    verdict = verdict.model_copy(update={"command": sys.argv, "environment": provenance()})
    write_measurements(folder / MEASUREMENTS_FILE, judgement.measurements)
    write_whole(folder / VERDICT_FILE, verdict.to_json())
    return verdict


def find_operation(
    check: GenerateCheck,
    golden: Path,
    candidate: CandidateRequest,
    judgement: "Judgement",
    folder: Path,
    progress: Progress,
) -> str | None:
    """The first wrong operation of the stage that made the error, if one can be told."""
    from assay.comparing.limits import load_limits
    from assay.dtypes import float_format
    from assay.generate.closer import read_operations
    from assay.locating.operations import find_wrong_operation
    from assay.trace import Trace

    batch, step = judgement.call or (0, 0)
    dtype = candidate.candidate.rpartition("/")[2]
    sides = {}
    for name, request in (("reference", None), ("candidate", candidate)):
        closer = CloserRequest(
            model=check.model,
            golden=str(golden),
            dtype=dtype,
            folder=str(folder / f"operations-{name}"),
            module=judgement.verdict.location.module or "",  # type: ignore[union-attr]
            batch=batch,
            step=step,
            candidate=request,
            remote_code=check.remote_code,
        )
        wrapped = {"kind": "closer", "request": closer.model_dump()}
        run_process(WORKER, wrapped, folder, name=f"operations-{name}", progress=progress, preload=PRELOAD)
        trace = Trace.open(closer.folder)
        for part in ("candidate",) if request else ("yardstick", "noise"):
            names = trace.attachment_json(f"{part}-names")
            sides[part] = read_operations(names, trace.attachment(part))  # type: ignore[arg-type]
    wrong = find_wrong_operation(
        sides["candidate"],
        sides["yardstick"],
        sides["noise"],
        load_limits(check.limits),
        float_format(dtype).unit_roundoff,
    )
    return wrong.name if wrong is not None else None


def judge(
    golden: Path, dtype: str, candidate: Path, answer: Answer, limits: str
) -> "Judgement":
    """The judgement over a candidate's results."""
    from assay.comparing.limits import load_limits  # torch is not needed for --help
    from assay.generate.evidence import Evidence
    from assay.generate.golden import GoldenSection, read_golden
    from assay.generate.judging import judge_generation
    from assay.generate.requests import CandidateReport
    from assay.trace import Trace

    evidence = Evidence(
        read_golden(golden),
        GoldenSection.open(golden, dtype),
        Trace.open(candidate),
        CandidateReport.model_validate(answer.result),
        load_limits(limits),
    )
    return judge_generation(evidence)


def write_measurements(path: Path, measurements: Sequence[Measurement]) -> None:
    """One JSON object a line."""
    write_whole(path, "".join(row.model_dump_json() + "\n" for row in measurements))
