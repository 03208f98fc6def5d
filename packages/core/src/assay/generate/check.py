"""`assay check generate`: run both sides in processes, judge, and write the verdict."""

import importlib
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from assay.comparing.limits import load_limits
from assay.devices.detection.isolation import require_run
from assay.errors import AssayError, UsageError
from assay.generate.processes.options import CandidateOptions
from assay.generate.processes.remote_functions import CANDIDATE, EARLY, GOLDEN, PRELOAD
from assay.generate.processes.requests import (
    CandidateReport,
    CandidateRequest,
    GenerateCheck,
    GoldenManifest,
    GoldenRequest,
    InputOptions,
)
from assay.inputs import parse_lengths, read_prompts
from assay.launch import FORK_SERVER, call, world_of
from assay.plugins import find_plugin_file
from assay.runs import Progress
from assay.runs.results import (
    CANDIDATE_FOLDER,
    GOLDEN_FOLDER,
    rank_folder,
    remove_recordings,
    write_results,
    write_verdict,
)
from assay.verdicts import Verdict

if TYPE_CHECKING:
    from assay.generate.judging.verdict import Judgement


def capture(request: GoldenRequest, folder: Path, progress: Progress) -> GoldenManifest:
    """Capture a golden in its own process, whose log goes to `folder`."""
    require_run(request.reference)
    _require_readable(request.inputs)
    return call(GOLDEN, request, folder=folder, name="reference", progress=progress)[0]


def _require_readable(inputs: InputOptions) -> None:
    """Raise UsageError, before a model is loaded, for prompts and lengths that no model could take."""
    if inputs.prompts is not None:
        read_prompts(Path(inputs.prompts))
    if inputs.prompt_length:
        parse_lengths(inputs.prompt_length)


def check_generate(check: GenerateCheck, folder: Path, progress: Progress) -> Verdict:
    """Run both sides, judge, and write verdict.json and measurements.jsonl into `folder`."""
    load_limits(check.limits)
    CandidateOptions.parse(check.options)
    _require_readable(check.inputs)
    if check.setup is not None:
        find_plugin_file(check.setup)
    if check.golden is not None and not check.golden.is_dir():
        raise UsageError(f"there is no folder {check.golden}")
    FORK_SERVER.preload(PRELOAD)
    with progress.step("looks for the devices"):  # before anything is computed
        for run in (check.reference, check.candidate):
            if run is not None:
                require_run(run)
    _import_meanwhile("assay.generate.judging.verdict", "assay.report.publish")
    golden = check.golden or folder / GOLDEN_FOLDER
    candidate = CandidateRequest(
        model=check.model,
        candidate=check.candidate,
        golden=str(golden),
        folder=str(folder / CANDIDATE_FOLDER),
        setup=check.setup,
        level=check.level,
        options=check.options,
        mesh={} if check.num_ranks == 1 else dict(check.mesh),
        inputs=check.inputs.model_dump(include=set(check.given)) if check.golden else {},
        remote_code=check.remote_code,
    )
    if check.golden is None:
        if check.setup is not None or check.options or candidate.mesh:
            # In its own process, as it may patch globals; a mistake costs no reference run.
            name = "candidate-setup"
            call(EARLY, candidate, folder=folder, name=name, progress=progress)
        _capture_golden(check, golden, folder, progress)
    elif check.verify_golden:
        from assay.generate.processes.golden_folder import verify_golden  # torch

        with progress.step("verifies the golden"):
            verify_golden(check.golden, check.dtype)
    judgement = _run_and_judge(golden, check, candidate, progress)
    # Written before the follow-up, so that the verdict exists if the follow-up fails.
    verdict = write_results(judgement.verdict, judgement.measurements, folder, check.command)
    if judgement.origin is not None:
        from assay.generate.followup import follow_up  # torch

        judgement = follow_up(judgement, check, candidate, folder, progress)
        verdict = write_verdict(judgement.verdict, folder, check.command)
    remove_recordings(folder, check.keep)
    return verdict


def _import_meanwhile(*modules: str) -> None:
    """Import in a thread, while other processes run, what this process needs after them."""

    def import_all() -> None:
        # An ImportError is raised again at the first use.
        with suppress(ImportError):
            for module in modules:
                importlib.import_module(module)

    threading.Thread(target=import_all, daemon=True).start()


def _capture_golden(check: GenerateCheck, golden: Path, folder: Path, progress: Progress) -> None:
    if check.reference is None:
        raise UsageError("a check needs --reference RUN or --golden TRACE")
    request = GoldenRequest(
        model=check.model,
        reference=check.reference,
        noise_for=[check.dtype],
        inputs=check.inputs,
        level="module" if check.level == "modules" else "logits",
        folder=str(golden),
        max_disk=check.max_disk,
        max_memory=check.max_memory,
        max_seconds=check.max_seconds,
        remote_code=check.remote_code,
    )
    call(GOLDEN, request, folder=folder, name="reference", progress=progress)


def _run_and_judge(
    golden: Path,
    check: GenerateCheck,
    candidate: CandidateRequest,
    progress: Progress,
) -> "Judgement":
    """Run the candidate in one process or on its ranks, and judge it."""
    results = Path(candidate.folder)
    world = world_of(check.mesh, check.candidate.device)
    try:
        reports = call(
            CANDIDATE,
            candidate,
            world=world,
            folder=results.parent,
            name=results.name,
            progress=progress,
        )
    except AssayError:
        if check.golden is None:
            progress.note(f"the reference is kept: --golden {golden.parent} reads it again")
        raise
    from assay.generate.judging.verdict import merge_weight_facts, worst_of_ranks  # torch

    with progress.step("judges"):
        if len(reports) == 1:
            return _judge(golden, check, results, reports[0])
        return worst_of_ranks(
            [
                _judge(golden, check, rank_folder(results, number), report)
                for number, report in enumerate(merge_weight_facts(reports))
            ]
        )


def _judge(
    golden: Path, check: GenerateCheck, results: Path, report: CandidateReport
) -> "Judgement":
    """Judge the `results` and `report` of one process."""
    from assay.generate.judging.evidence import GenerateEvidence  # torch is not needed for --help
    from assay.generate.judging.verdict import judge_generation
    from assay.generate.processes.golden_folder import GoldenSection, read_golden
    from assay.models.size import chosen_threads
    from assay.trace import Trace

    evidence = GenerateEvidence(
        read_golden(golden),
        GoldenSection.open(golden, check.dtype),
        Trace.open(results),
        report,
        load_limits(check.limits),
        check.level,
        check.allow_unused,
    )
    with chosen_threads(evidence.golden.model.num_parameters):
        return judge_generation(evidence)
